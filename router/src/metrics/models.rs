//! What is counted of each model. Clients cannot add to the models: their names are those that workers brought, which are
//! bounded, and a request for any other name counts as one for [`UNKNOWN`]. Whoever counts by the token holds the counters
//! of its model and looks nothing up.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::kinds::{Counter, Histogram, Size, Tokens, WordCounts};
use super::scrape::Scrape;

/// The model of requests that name none that is known. A model that is called so shares its counters.
pub const UNKNOWN: &str = "unknown";

/// Declares what is counted of a model: field, kind, name as scrapers see it, what it counts, and for words their label.
macro_rules! of_a_model {
    ($($field:ident: $Kind:ty = $name:literal, $help:literal $(, $label:ident)?;)+) => {
        /// What is counted of one model.
        #[derive(Debug, Default)]
        pub struct ModelMetrics {
            $(#[doc = $help] pub $field: $Kind,)+
        }

        fn show(models: &[(Arc<str>, Arc<ModelMetrics>)], scrape: &mut Scrape<'_>) -> fmt::Result {
            $(
                let family = Family { name: $name, help: $help, label: concat!($(stringify!($label))?) };
                let samples = models.iter().map(|(model, counted)| (&**model, &counted.$field));
                <$Kind as OfModel>::show(family, samples, scrape)?;
            )+
            Ok(())
        }
    };
}

of_a_model! {
    requests: WordCounts = "headrace_requests_total",
        "Requests for answers and vectors that ended, by how: finished, or the kind of the error.", outcome;
    finish_reasons: WordCounts = "headrace_finish_reasons_total",
        "Choices that came to their end, by why: a stop token or string, or the length.", reason;
    prompt_tokens: Counter = "headrace_prompt_tokens_total",
        "Tokens of prompts.";
    completion_tokens: Counter = "headrace_completion_tokens_total",
        "Tokens generated.";
    cached_tokens: Counter = "headrace_cached_tokens_total",
        "Tokens of prompts that workers took from their prefix caches.";
    preemptions: Counter = "headrace_preemptions_total",
        "Times that workers took the blocks of a running request, to compute them again later.";
    prompt_sizes: Histogram<Tokens> = "headrace_request_prompt_tokens",
        "Prompts of requests that finished, in tokens.";
    output_sizes: Histogram<Tokens> = "headrace_request_output_tokens",
        "Answers to requests that finished, all choices together, in tokens.";
    queue_seconds: Histogram = "headrace_queue_seconds",
        "Wait for a worker with room.";
    ttft_seconds: Histogram = "headrace_ttft_seconds",
        "Arrival of a request to its first token.";
    itl_seconds: Histogram = "headrace_itl_seconds",
        "From step to step of one leg.";
    tpot_seconds: Histogram = "headrace_tpot_seconds",
        "Mean time for each token of a whole answer after its first.";
    request_seconds: Histogram = "headrace_request_seconds",
        "Arrival of a request to the end of its last choice.";
}

/// How a family is shown.
#[derive(Debug, Clone, Copy)]
struct Family {
    name: &'static str,
    help: &'static str,
    /// Of its words.
    label: &'static str,
}

/// A kind of metric that there is one of for each model.
trait OfModel: Sized + 'static {
    fn show<'a>(
        family: Family,
        samples: impl Iterator<Item = (&'a str, &'a Self)>,
        scrape: &mut Scrape<'_>,
    ) -> fmt::Result;
}

fn by_model(model: &str) -> [(&'static str, &str); 1] {
    [("model", model)]
}

impl OfModel for Counter {
    fn show<'a>(
        family: Family,
        samples: impl Iterator<Item = (&'a str, &'a Self)>,
        scrape: &mut Scrape<'_>,
    ) -> fmt::Result {
        let samples = samples.map(|(model, counter)| (by_model(model), counter.get()));
        scrape.counters(family.name, family.help, samples)
    }
}

impl<S: Size> OfModel for Histogram<S> {
    fn show<'a>(
        family: Family,
        samples: impl Iterator<Item = (&'a str, &'a Self)>,
        scrape: &mut Scrape<'_>,
    ) -> fmt::Result {
        let samples = samples.map(|(model, sizes)| (by_model(model), sizes.so_far()));
        scrape.histograms(family.name, family.help, samples)
    }
}

impl OfModel for WordCounts {
    fn show<'a>(
        family: Family,
        samples: impl Iterator<Item = (&'a str, &'a Self)>,
        scrape: &mut Scrape<'_>,
    ) -> fmt::Result {
        let samples = samples.flat_map(|(model, words)| {
            let counted = words.so_far().into_iter();
            counted.map(move |(word, count)| ([("model", model), (family.label, word)], count))
        });
        scrape.counters(family.name, family.help, samples)
    }
}

/// Sums over all models, those that were forgotten among them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AllTokens {
    /// Of prompts.
    pub prompt: u64,
    /// Of these, from prefix caches.
    pub cached: u64,
    /// Of answers.
    pub output: u64,
}

impl AllTokens {
    fn add(&mut self, model: &ModelMetrics) {
        self.prompt += model.prompt_tokens.get();
        self.cached += model.cached_tokens.get();
        self.output += model.completion_tokens.get();
    }
}

/// All models of a router. A copy is the same.
#[derive(Debug, Clone, Default)]
pub struct Models(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    known: BTreeMap<Arc<str>, Arc<ModelMetrics>>,
    forgotten: AllTokens,
}

impl Models {
    /// The counters of a model that workers bring. Whoever calls this bounds the names, and forgets them again.
    #[must_use]
    pub fn of(&self, model: &str) -> Arc<ModelMetrics> {
        let mut state = self.state();
        if let Some(known) = state.known.get(model) {
            return Arc::clone(known);
        }
        let counted = Arc::new(ModelMetrics::default());
        state.known.insert(model.into(), Arc::clone(&counted));
        counted
    }

    /// Shows a model no more.
    pub(crate) fn forget(&self, model: &str) {
        let mut state = self.state();
        if let Some(gone) = state.known.remove(model) {
            state.forgotten.add(&gone);
        }
    }

    /// Sums over all models. They never fall.
    #[must_use]
    pub fn tokens(&self) -> AllTokens {
        let state = self.state();
        let mut sum = state.forgotten;
        state.known.values().for_each(|model| sum.add(model));
        sum
    }

    /// The models in the order of their names.
    pub(super) fn all(&self) -> Vec<(Arc<str>, Arc<ModelMetrics>)> {
        let state = self.state();
        state.known.iter().map(|(name, model)| (Arc::clone(name), Arc::clone(model))).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // no holder panics
    }
}

impl Collector for Models {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        show(&self.all(), &mut Scrape::new(encoder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Exposition;

    fn page(models: &Models) -> String {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(models.clone()));
        Exposition::Text.render(&registry)
    }

    #[test]
    fn each_model_has_samples_of_its_own_until_it_is_forgotten_and_sums_never_fall() {
        let models = Models::default();
        models.of("a").completion_tokens.inc_by(3);
        models.of("a").prompt_tokens.inc();
        models.of("b\"c").completion_tokens.inc_by(4);
        models.of("a").requests.inc("finished");
        models.of("a").output_sizes.add(3.0);
        let text = page(&models);
        for sample in [
            r#"headrace_completion_tokens_total{model="a"} 3"#,
            r#"headrace_completion_tokens_total{model="b\"c"} 4"#,
            r#"headrace_requests_total{model="a",outcome="finished"} 1"#,
            r#"headrace_request_output_tokens_bucket{le="5.0",model="a"} 1"#,
            r#"headrace_request_output_tokens_count{model="a"} 1"#,
            r#"headrace_ttft_seconds_count{model="a"} 0"#,
        ] {
            assert!(text.lines().any(|line| line == sample), "{sample} of {text}");
        }
        let before = models.tokens();
        assert_eq!(before, AllTokens { prompt: 1, cached: 0, output: 7 });
        models.forget("a");
        models.forget("a");
        assert_eq!(models.tokens(), before);
        assert!(!page(&models).contains(r#"model="a""#), "{}", page(&models));
        models.of("a").completion_tokens.inc();
        assert_eq!(models.tokens().output, 8);
    }
}
