//! Log-probabilities of an answer that is sent as a whole, kept in 12 bytes for each alternative until all of it is there.

use crate::core::frame::Ranked;
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare, Refused};
use crate::request::ScoredToken;

/// The first segment's size, in bytes; each one is twice as long as the one before, up to the largest. Growing by
/// segments copies nothing.
const FIRST_SEGMENT: usize = 512;
const LARGEST_SEGMENT: usize = 64 << 10;

/// Of a token, without its alternatives: its id, its log-probability, how many alternatives follow.
const TOKEN_BYTES: usize = 4 + 8 + 1;
/// Of an alternative: its id and its log-probability.
const RANKED_BYTES: usize = 4 + 8;

/// What a token with so many alternatives takes.
pub(in crate::http) fn token_bytes(alternatives: usize) -> usize {
    TOKEN_BYTES + alternatives * RANKED_BYTES
}

/// Tokens with their log-probabilities, in order.
#[derive(Debug, Default)]
pub(in crate::http) struct TokenLog {
    segments: Vec<Vec<u8>>,
}

/// How far a log was read.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::http) struct Cursor {
    segment: usize,
    byte: usize,
}

impl TokenLog {
    pub(in crate::http) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Appends a token; of more than 255 alternatives the first.
    ///
    /// # Errors
    /// Nothing was appended then.
    pub(in crate::http) fn push(
        &mut self,
        token: &ScoredToken,
        memory: &mut MemoryShare,
    ) -> Result<(), Refused> {
        let top = &token.top[..token.top.len().min(usize::from(u8::MAX))];
        let bytes = token_bytes(top.len());
        let last = self.segments.last();
        if last.is_none_or(|last| last.capacity() - last.len() < bytes) {
            let size = last.map_or(FIRST_SEGMENT, |last| 2 * last.capacity());
            let size = size.min(LARGEST_SEGMENT).max(bytes);
            memory.room_for_one(&mut self.segments)?;
            memory.charge(size + ALLOCATION_BYTES)?;
            self.segments.push(Vec::with_capacity(size));
        }
        let Some(out) = self.segments.last_mut() else { return Ok(()) };
        out.extend_from_slice(&token.id.to_le_bytes());
        // NaN stands for none: a worker's NaN is written as if there were none, too
        out.extend_from_slice(&token.logprob.unwrap_or(f64::NAN).to_le_bytes());
        out.push(u8::try_from(top.len()).unwrap_or(u8::MAX));
        for Ranked(id, logprob) in top {
            out.extend_from_slice(&id.to_le_bytes());
            out.extend_from_slice(&logprob.to_le_bytes());
        }
        Ok(())
    }

    /// The token at `cursor`, which moves behind it; `None` at the end.
    pub(in crate::http) fn read(&self, cursor: &mut Cursor) -> Option<ScoredToken> {
        let mut segment = self.segments.get(cursor.segment)?;
        if cursor.byte == segment.len() {
            *cursor = Cursor { segment: cursor.segment + 1, byte: 0 };
            segment = self.segments.get(cursor.segment)?;
        }
        let mut rest = segment.get(cursor.byte..)?;
        let Ranked(id, logprob) = ranked(&mut rest)?;
        let alternatives = *rest.split_off_first()?;
        let top: Option<Vec<Ranked>> = (0..alternatives).map(|_| ranked(&mut rest)).collect();
        cursor.byte += token_bytes(usize::from(alternatives));
        Some(ScoredToken { id, logprob: Some(logprob).filter(|l| !l.is_nan()), top: top? })
    }
}

fn ranked(rest: &mut &[u8]) -> Option<Ranked> {
    let (id, after) = rest.split_first_chunk()?;
    let (logprob, after) = after.split_first_chunk()?;
    *rest = after;
    Some(Ranked(u32::from_le_bytes(*id), f64::from_le_bytes(*logprob)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::memory::MemoryPool;

    fn token() -> impl Strategy<Value = ScoredToken> {
        let ranked = (any::<u32>(), -50.0..0.0).prop_map(|(id, logprob)| Ranked(id, logprob));
        let logprob = prop::option::of(-50.0..=0.0);
        (any::<u32>(), logprob, prop::collection::vec(ranked, 0..40))
            .prop_map(|(id, logprob, top)| ScoredToken { id, logprob, top })
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_again(tokens in prop::collection::vec(token(), 0..300)) {
            let mut memory = MemoryPool::private(1 << 20).share();
            let mut log = TokenLog::default();
            for token in &tokens {
                log.push(token, &mut memory).unwrap();
            }
            let mut cursor = Cursor::default();
            let read: Vec<_> = std::iter::from_fn(|| log.read(&mut cursor)).collect();
            prop_assert_eq!(&read, &tokens);
            let held: usize = log.segments.iter().map(Vec::capacity).sum();
            prop_assert!(memory.used() >= held + log.segments.capacity() * 24);
        }
    }

    #[test]
    fn of_very_many_alternatives_the_first_are_kept() {
        let many = |n: u32| (0..n).map(|id| Ranked(id, -1.0)).collect();
        let mut memory = MemoryPool::private(1 << 20).share();
        let mut log = TokenLog::default();
        for n in [300, 0, 255, 256] {
            let token = ScoredToken { id: n, logprob: None, top: many(n) };
            log.push(&token, &mut memory).unwrap();
        }
        let mut cursor = Cursor::default();
        let read = std::iter::from_fn(|| log.read(&mut cursor));
        let read: Vec<_> = read.map(|token| (token.id, token.top.len())).collect();
        assert_eq!(read, [(300, 255), (0, 0), (255, 255), (256, 255)]);
        let held: usize = log.segments.iter().map(|segment| segment.capacity() + 16).sum();
        assert!(memory.used() >= held, "{} for {held}", memory.used());
    }

    #[test]
    fn a_token_takes_little_more_than_its_numbers() {
        let mut memory = MemoryPool::private(1 << 30).share();
        let mut log = TokenLog::default();
        let top = (0..20).map(|id| Ranked(id, -1.0)).collect();
        let token = ScoredToken { id: 7, logprob: Some(-1.0), top };
        for _ in 0..10_000 {
            log.push(&token, &mut memory).unwrap();
        }
        assert!(memory.used() < 10_000 * 253 * 21 / 20, "{}", memory.used());
    }

    #[test]
    fn a_log_that_was_refused_stays_as_it_is() {
        let mut memory = MemoryPool::private(2_000).share();
        let mut log = TokenLog::default();
        let token = ScoredToken { id: 7, logprob: None, top: Vec::new() };
        let mut pushed = 0;
        while log.push(&token, &mut memory).is_ok() {
            pushed += 1;
        }
        let mut cursor = Cursor::default();
        assert_eq!(std::iter::from_fn(|| log.read(&mut cursor)).count(), pushed);
    }
}
