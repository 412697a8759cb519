//! All that the router counts, by subject, and its text for Prometheus.

mod http;
mod kinds;
mod legs;
mod links;
mod requests;
mod scheduling;
mod text;
mod transfers;

pub use http::Http;
pub use kinds::{Counter, Gauge, Histogram, Labelled};
pub use legs::Legs;
pub use links::Links;
pub use requests::Requests;
pub use scheduling::Scheduling;
pub use text::Text;
pub use transfers::Transfers;
pub(crate) use transfers::{BACKENDS, OUTCOMES, known_word};

/// All that the router counts; `App::render_metrics` adds what is read off at that moment.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Clients and their connections.
    pub http: Http,
    /// Requests and their tokens.
    pub requests: Requests,
    /// Their parts on one worker each.
    pub legs: Legs,
    /// KV from worker to worker.
    pub transfers: Transfers,
    /// Workers that come, go and fail.
    pub links: Links,
    /// Placements, and what they rely on.
    pub scheduling: Scheduling,
}

impl Metrics {
    /// Everything counted here, in the text format of Prometheus; more families may follow.
    #[must_use]
    pub fn render(&self) -> Text {
        let mut text = Text::default();
        text.family("headrace_build_info", "gauge", "Version of the router; always 1.");
        text.sample("", &[("version", &env!("CARGO_PKG_VERSION"))], 1);
        self.http.render(&mut text);
        self.requests.render(&mut text);
        self.legs.render(&mut text);
        self.transfers.render(&mut text);
        self.links.render(&mut text);
        self.scheduling.render(&mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_text_is_well_formed() {
        let metrics = Metrics::default();
        metrics.http.request("/v1/chat/completions", 200, "");
        metrics.links.errors.inc(["a \"quoted\"\nreason\\"]);
        metrics.requests.ttft_seconds.observe(Duration::from_millis(3));
        metrics.requests.ttft_seconds.observe(Duration::from_secs(10_000));
        let text = metrics.render().into_string();
        assert!(text.ends_with('\n'));
        assert!(text.contains(
            "headrace_http_requests_total{route=\"/v1/chat/completions\",status=\"200\",error=\"\"} 1\n"
        ));
        assert!(text.contains(r#"{reason="a \"quoted\"\nreason\\"} 1"#));
        assert!(text.contains("headrace_ttft_seconds_bucket{le=\"0.0025\"} 0\n"));
        assert!(text.contains("headrace_ttft_seconds_bucket{le=\"0.005\"} 1\n"));
        assert!(text.contains("headrace_ttft_seconds_bucket{le=\"+Inf\"} 2\n"));
        assert!(text.contains("headrace_ttft_seconds_count 2\n"));
        let mut seen = std::collections::HashSet::new();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                family = help.split(' ').next().unwrap().to_owned();
                assert!(seen.insert(family.clone()), "{family} twice");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                assert!(kind.starts_with(&family), "{line}");
            } else {
                assert!(line.starts_with(&family), "{line}");
                let value = line.rsplit(' ').next().unwrap();
                assert!(value.parse::<f64>().is_ok(), "{line}");
            }
        }
    }
}
