//! The hit rate that one cache with the memory of the whole fleet would reach: what no routing can pass by much.

use std::collections::{BTreeMap, HashMap};

use crate::trace::Requests;

/// Share of the prompt tokens found, with the requests in order, each done before the next. A block counts whole up to
/// the length of the prompt, the last one too.
pub(crate) fn bound_hit_rate(requests: &Requests, cache_blocks: usize) -> f64 {
    let mut cache = Lru::new(cache_blocks);
    let (mut cached, mut prompt) = (0_u64, 0_u64);
    for row in &requests.rows {
        let held = row.blocks.iter().take_while(|id| cache.holds(**id)).count() as u64;
        cached += (held * u64::from(requests.block_tokens)).min(u64::from(row.input_tokens));
        prompt += u64::from(row.input_tokens);
        for id in row.blocks.iter().rev() {
            cache.touch(*id); // the beginnings of prompts last, so that they stay longest
        }
    }
    cached as f64 / prompt.max(1) as f64
}

/// Blocks by the time of their last use.
struct Lru {
    capacity: usize,
    clock: u64,
    used: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
}

impl Lru {
    fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, used: HashMap::new(), order: BTreeMap::new() }
    }

    fn holds(&self, id: u64) -> bool {
        self.used.contains_key(&id)
    }

    fn touch(&mut self, id: u64) {
        self.clock += 1;
        if let Some(before) = self.used.insert(id, self.clock) {
            self.order.remove(&before);
        }
        self.order.insert(self.clock, id);
        if self.used.len() > self.capacity
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.used.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Row;

    fn requests(prompts: &[(u32, &[u64])]) -> Requests {
        let row = |(input_tokens, blocks): &(u32, &[u64])| Row {
            at_ms: 0.0,
            input_tokens: *input_tokens,
            output_tokens: 1,
            blocks: blocks.to_vec(),
            session: None,
        };
        Requests { name: "t".into(), block_tokens: 10, rows: prompts.iter().map(row).collect() }
    }

    #[test]
    fn a_prefix_seen_before_counts_up_to_the_prompts_length() {
        let trace = requests(&[(25, &[0, 1, 2]), (25, &[0, 1, 2]), (30, &[0, 1, 3])]);
        assert_eq!(bound_hit_rate(&trace, 100), (25.0 + 20.0) / 80.0);
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let trace = requests(&[(20, &[0, 1]), (20, &[5, 6]), (20, &[0, 1])]);
        assert_eq!(bound_hit_rate(&trace, 4), 20.0 / 60.0);
        assert_eq!(bound_hit_rate(&trace, 3), 10.0 / 60.0); // block 1 went, the end of the older prompt
        assert_eq!(bound_hit_rate(&trace, 2), 0.0);
    }
}
