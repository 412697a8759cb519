//! What `/metrics` shows of keys: those with a name by it, the first of them alone, and all others together. So the number of
//! labels is bounded whatever is in the file, and no label tells anything of a key.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet};

use super::KeyRing;
use crate::metrics::Scrape;

/// Keys that are shown each by its name. A guess: as many as a dashboard can show.
const MOST_NAMES: usize = 256;
/// What all keys without a name are called together, and those with a name beyond the bound.
const OTHERS: &str = "(others)";

/// The collector of the keys of a ring.
#[derive(Debug)]
pub(crate) struct KeysShown(pub(crate) Arc<KeyRing>);

#[derive(Debug, Default)]
struct Sums {
    requests: u64,
    tokens: [u64; 2],
    limited: [u64; 3],
    streams: u32,
}

#[derive(Debug, EncodeLabelSet)]
struct ByKey {
    key: String,
}

#[derive(Debug, EncodeLabelSet)]
struct ByKeyAnd {
    key: String,
    kind: &'static str,
}

impl KeysShown {
    fn sums(&self) -> BTreeMap<String, Sums> {
        let now = self.0.now();
        let mut all: BTreeMap<String, Sums> = BTreeMap::new();
        for key in &now.by_client {
            let name = key
                .terms()
                .name
                .as_deref()
                .filter(|name| all.len() < MOST_NAMES || all.contains_key(*name));
            let sums = all.entry(name.unwrap_or(OTHERS).to_owned()).or_default();
            let used = key.used();
            sums.requests += used.requests.load(Relaxed);
            let tokens = [&used.prompt_tokens, &used.completion_tokens];
            for (sum, count) in sums.tokens.iter_mut().zip(tokens) {
                *sum += count.load(Relaxed);
            }
            for (sum, count) in sums.limited.iter_mut().zip(&used.limited) {
                *sum += count.load(Relaxed);
            }
            sums.streams = sums.streams.saturating_add(key.streams());
        }
        all
    }
}

impl Collector for KeysShown {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let sums = self.sums();
        let mut scrape = Scrape::new(encoder);
        let by_key = |key: &String| ByKey { key: key.clone() };
        scrape.counters(
            "headrace_key_requests_total",
            "Requests that were let in by a key; keys have names by name= in their line.",
            sums.iter().map(|(key, sums)| (by_key(key), sums.requests)),
        )?;
        scrape.counters(
            "headrace_key_tokens_total",
            "Tokens of the requests of a key.",
            of_kinds(&sums, ["prompt", "completion"], |sums| sums.tokens),
        )?;
        scrape.counters(
            "headrace_key_limited_total",
            "Requests that were refused because a key had used what it may.",
            of_kinds(&sums, ["requests", "tokens", "streams"], |sums| sums.limited),
        )?;
        scrape.gauges(
            "headrace_key_streams",
            "Answers of a key in flight.",
            sums.iter().map(|(key, sums)| (by_key(key), sums.streams)),
        )
    }
}

fn of_kinds<const N: usize>(
    sums: &BTreeMap<String, Sums>,
    kinds: [&'static str; N],
    counts: fn(&Sums) -> [u64; N],
) -> impl Iterator<Item = (ByKeyAnd, u64)> {
    sums.iter().flat_map(move |(key, sums)| {
        let kinds = kinds.into_iter().zip(counts(sums));
        kinds.map(|(kind, count)| (ByKeyAnd { key: key.clone(), kind }, count))
    })
}
