//! The text of `/metrics`: OpenMetrics for scrapers that accept it, else the format that Prometheus read before.

use std::fmt::Write as _;

use axum::http::{HeaderMap, header};
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

/// How samples are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exposition {
    /// Names without the suffixes of their types, units apart, an end that can be told from a broken connection.
    OpenMetrics,
    /// Prometheus' text format 0.0.4, which every scraper reads.
    Text,
}

impl Exposition {
    /// OpenMetrics only for a client that names it: `*/*` comes from browsers and curl, too.
    #[must_use]
    pub fn accepted(headers: &HeaderMap) -> Self {
        let mut ranges = headers
            .get_all(header::ACCEPT)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','));
        if ranges.any(takes_openmetrics) { Self::OpenMetrics } else { Self::Text }
    }

    /// For the answer's header.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// All that is registered, as it is now.
    #[must_use]
    pub fn render(self, registry: &Registry) -> String {
        let mut page = String::new();
        text::encode(&mut page, registry).expect("memory takes any text");
        match self {
            Self::OpenMetrics => page,
            Self::Text => without_openmetrics(&page),
        }
    }
}

/// One range of an Accept header, such as `application/openmetrics-text;version=1.0.0;q=0.5`.
fn takes_openmetrics(range: &str) -> bool {
    let mut parts = range.split(';').map(str::trim);
    let named =
        parts.next().is_some_and(|name| name.eq_ignore_ascii_case("application/openmetrics-text"));
    let refused = parts.any(|part| {
        let weight = part.strip_prefix("q=").or_else(|| part.strip_prefix("Q="));
        weight.and_then(|weight| weight.parse::<f32>().ok()) == Some(0.0)
    });
    named && !refused
}

/// The same samples in text format 0.0.4, where a family is called as its samples are.
fn without_openmetrics(page: &str) -> String {
    let mut out = String::with_capacity(page.len());
    let mut help = ""; // comes before the type, which says how samples are called
    for line in page.lines() {
        if let Some(text) = line.strip_prefix("# HELP ") {
            help = text.split_once(' ').map_or("", |(_, text)| text);
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|text| text.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            let name = format!("{name}{suffix}");
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}"); // memory takes it
        } else if !line.starts_with('#') {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;
    use crate::metrics::Metrics;

    fn pages() -> [String; 2] {
        let metrics = Metrics::default();
        metrics.http.request("/v1/chat/completions", 200, "");
        metrics.links.errors.inc("a \"quoted\"\nreason\\");
        metrics.requests.encode_seconds.observe(Duration::from_millis(3));
        metrics.requests.encode_seconds.observe(Duration::from_secs(10_000));
        metrics.models.of("m").prompt_sizes.add(3.0);
        metrics.transfers.bytes.inc_by(7);
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        [Exposition::OpenMetrics, Exposition::Text].map(|format| format.render(&registry))
    }

    #[test]
    fn both_formats_hold_the_same_samples() {
        let [open, text] = pages().map(|page| {
            page.lines()
                .filter(|line| !line.starts_with('#'))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        });
        assert_eq!(open, text);
        for sample in [
            "headrace_http_requests_total{route=\"/v1/chat/completions\",status=\"200\",error=\"\"} 1",
            r#"headrace_link_errors_total{reason="a \"quoted\"\nreason\\"} 1"#,
            "headrace_encode_seconds_bucket{le=\"0.0025\"} 0",
            "headrace_encode_seconds_bucket{le=\"0.005\"} 1",
            "headrace_encode_seconds_bucket{le=\"1.0\"} 1",
            "headrace_encode_seconds_bucket{le=\"+Inf\"} 2",
            "headrace_encode_seconds_count 2",
            "headrace_transfer_bytes_total 7",
            "headrace_shadow_regret_seconds_total 0.0",
            concat!("headrace_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        ] {
            assert!(text.iter().any(|line| line == sample), "{sample} of {text:#?}");
        }
    }

    #[test]
    fn families_are_well_formed_in_both_formats() {
        for (page, is_open) in pages().into_iter().zip([true, false]) {
            assert_eq!(page.ends_with("# EOF\n"), is_open);
            let (mut families, mut samples) = (HashSet::new(), HashSet::new());
            let (mut family, mut kind, mut unit) = (String::new(), String::new(), String::new());
            for line in page.lines().filter(|line| *line != "# EOF") {
                let (name, rest) = match line.strip_prefix("# ") {
                    Some(text) => text.split_once(' ').unwrap().1.split_once(' ').unwrap(),
                    None => line.split_once(['{', ' ']).unwrap(),
                };
                if line.starts_with("# HELP ") {
                    family = name.into();
                    assert!(families.insert(family.clone()), "{family} twice");
                    assert!(rest.ends_with('.') && !rest.ends_with(".."), "{line}");
                    unit = String::new();
                } else if line.starts_with("# TYPE ") {
                    assert_eq!(name, family);
                    kind = rest.into();
                } else if line.starts_with("# UNIT ") {
                    assert_eq!(name, family);
                    unit = rest.into();
                    assert!(is_open && family.ends_with(&format!("_{unit}")), "{line}");
                } else {
                    let suffix = name.strip_prefix(&family).unwrap_or_else(|| panic!("{line}"));
                    let known: &[&str] = match (kind.as_str(), is_open) {
                        ("counter", true) => &["_total"],
                        ("info", true) => &["_info"],
                        ("histogram", _) => &["_bucket", "_sum", "_count"],
                        ("counter" | "gauge", _) => &[""],
                        other => panic!("{other:?}"),
                    };
                    assert!(known.contains(&suffix), "{line} of {family}, a {kind}");
                    let (series, value) = line.rsplit_once(' ').unwrap();
                    assert!(samples.insert(series.to_owned()), "{series} twice");
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    let of_unit = ["_seconds", "_bytes"].iter().any(|unit| family.ends_with(unit));
                    assert_eq!(!unit.is_empty(), is_open && of_unit, "{line}");
                }
            }
        }
    }

    #[test]
    fn openmetrics_is_for_those_who_name_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,\
            text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        for (accept, expected) in [
            (prometheus, Exposition::OpenMetrics),
            ("text/html, Application/OpenMetrics-Text", Exposition::OpenMetrics),
            ("*/*", Exposition::Text),
            ("", Exposition::Text),
            ("text/plain", Exposition::Text),
            ("application/openmetrics-text; q=0, */*", Exposition::Text),
            ("application/openmetrics-text-not", Exposition::Text),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]);
            assert_eq!(Exposition::accepted(&headers), expected, "{accept}");
        }
        assert_eq!(Exposition::accepted(&HeaderMap::new()), Exposition::Text);
    }
}
