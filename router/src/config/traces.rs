//! Where spans go, and of which requests there are some: flags, and the variables that OpenTelemetry has for every program.
//!
//! Its exporter reads those of headers by itself, and its resource OTEL_RESOURCE_ATTRIBUTES.

use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;

use super::{ConfigError, RouterArgs, environment, flag, flag_or_variable};

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const TIMEOUTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
const CERTIFICATES: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"];

/// The one form in which spans are sent.
const PROTOCOL: &str = "http/protobuf";
/// Where spans are taken at a collector.
const PATH: &str = "/v1/traces";
/// The standard's own default.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A collector that takes longer is none. A guess.
const MOST_TIMEOUT_MS: u64 = 600_000;

/// What the variables say. Of two, the one about traces counts.
#[derive(Debug, Clone, Default)]
pub struct TracesVariables {
    /// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: the whole URL.
    pub endpoint: Option<String>,
    /// OTEL_EXPORTER_OTLP_PROTOCOL: the form of what is sent, with the variable that says so.
    pub protocol: Option<(&'static str, String)>,
    /// OTEL_EXPORTER_OTLP_TIMEOUT in ms, with the variable that says so.
    pub timeout_ms: Option<(&'static str, String)>,
    /// OTEL_EXPORTER_OTLP_CERTIFICATE: a file of certificates.
    pub certificate: Option<PathBuf>,
    /// OTEL_SERVICE_NAME.
    pub service: Option<String>,
    /// OTEL_SDK_DISABLED.
    pub disabled: bool,
}

impl TracesVariables {
    /// As they are now.
    #[must_use]
    pub fn from_environment() -> Self {
        let first = |names: [&'static str; 2]| {
            names.into_iter().find_map(|name| Some((name, environment::one(name)?)))
        };
        Self {
            endpoint: environment::one(TRACES_ENDPOINT),
            protocol: first(PROTOCOLS),
            timeout_ms: first(TIMEOUTS),
            certificate: first(CERTIFICATES).map(|(_, path)| path.into()),
            service: environment::one("OTEL_SERVICE_NAME"),
            disabled: environment::one("OTEL_SDK_DISABLED")
                .is_some_and(|value| value.eq_ignore_ascii_case("true")),
        }
    }
}

/// Spans are made, and sent there.
#[derive(Debug, Clone, PartialEq)]
pub struct TracesConfig {
    /// The whole URL, of http or https and with a host.
    pub endpoint: Uri,
    /// Of requests whose client says nothing of its trace, the share that is traced: 0 to 1.
    pub sample_ratio: f64,
    /// For one try to send spans.
    pub timeout: Duration,
    /// Vouches for a collector with https, in the place of the system's own.
    pub certificate: Option<PathBuf>,
    /// The name that whoever runs it gives this service.
    pub service: Option<String>,
}

impl TracesConfig {
    /// `None`: no spans.
    pub(super) fn check(args: &RouterArgs) -> Result<Option<Self>, ConfigError> {
        let ratio = args.otlp_sample_ratio;
        if !(0.0..=1.0).contains(&ratio) {
            let problem = format!("{ratio} is no share");
            return Err(flag("otlp-sample-ratio", problem, "take a number from 0 to 1"));
        }
        let said = &args.otlp;
        let given = args.otlp_endpoint.as_deref().filter(|text| !text.is_empty());
        let by_flag = given.is_some() && environment::one(ENDPOINT).as_deref() != given;
        let endpoint = match (given, &said.endpoint) {
            // of variables the one about traces counts, and a flag before both
            (Some(text), None) => base(text)?,
            (Some(text), Some(_)) if by_flag => base(text)?,
            (_, Some(text)) => {
                url(text).map_err(|problem| variable(TRACES_ENDPOINT, problem, REMEDY))?
            }
            (None, None) => return Ok(None),
        };
        if said.disabled {
            return Ok(None);
        }
        if let Some((name, protocol)) = &said.protocol
            && protocol != PROTOCOL
        {
            let remedy =
                format!("set it to {PROTOCOL}, and the endpoint to the port for that (4318)");
            return Err(variable(name, format!("{protocol:?} is not spoken here"), &remedy));
        }
        let timeout = said.timeout_ms.as_ref().map(|(name, text)| {
            let ms = text.parse().ok().filter(|ms| (1..=MOST_TIMEOUT_MS).contains(ms));
            let remedy = format!("it is a number of ms from 1 to {MOST_TIMEOUT_MS}");
            ms.ok_or_else(|| variable(name, format!("is {text:?}"), &remedy))
        });
        Ok(Some(Self {
            endpoint,
            sample_ratio: ratio,
            timeout: timeout.transpose()?.map_or(TIMEOUT, Duration::from_millis),
            certificate: said.certificate.clone(),
            service: said.service.clone(),
        }))
    }
}

const REMEDY: &str = "write a URL such as http://localhost:4318";

/// The path for traces, at the URL of a collector.
fn base(text: &str) -> Result<Uri, ConfigError> {
    url(text)
        .and_then(|_| url(&format!("{}{PATH}", text.trim_end_matches('/'))))
        .map_err(|problem| flag_or_variable("otlp-endpoint", ENDPOINT, text, problem, REMEDY))
}

fn url(text: &str) -> Result<Uri, String> {
    let uri: Uri = text.parse().map_err(|error| format!("{text:?} is not a URL ({error})"))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(format!("{text:?} begins with neither http:// nor https://"));
    }
    if uri.host().is_none_or(str::is_empty) || uri.query().is_some() {
        return Err(format!("{text:?} has no host, or a query"));
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        // not repeated: it may be a password
        return Err("it has a user in it; OTEL_EXPORTER_OTLP_HEADERS is for that".into());
    }
    Ok(uri)
}

fn variable(variable: &'static str, problem: String, remedy: &str) -> ConfigError {
    ConfigError::Variable { variable, problem, remedy: remedy.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(change: impl FnOnce(&mut RouterArgs)) -> Result<Option<TracesConfig>, String> {
        let mut args = RouterArgs { otlp: TracesVariables::default(), ..RouterArgs::default() };
        args.otlp_endpoint = None;
        change(&mut args);
        TracesConfig::check(&args).map_err(|error| error.to_string())
    }

    fn endpoint(text: &str) -> Result<String, String> {
        of(|args| args.otlp_endpoint = Some(text.into()))
            .map(|config| config.expect("it traces").endpoint.to_string())
    }

    #[test]
    fn without_an_endpoint_there_are_no_spans() {
        assert_eq!(of(|_| {}), Ok(None));
        assert_eq!(of(|args| args.otlp_endpoint = Some(String::new())), Ok(None), "as if unset");
        let disabled = of(|args| {
            args.otlp_endpoint = Some("http://c:4318".into());
            args.otlp.disabled = true;
        });
        assert_eq!(disabled, Ok(None));
    }

    #[test]
    fn the_path_for_traces_is_added_to_the_url_of_a_collector() {
        for (text, whole) in [
            ("http://localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("https://c.example/otlp", "https://c.example/otlp/v1/traces"),
            ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ] {
            assert_eq!(endpoint(text).as_deref(), Ok(whole));
        }
        let whole = of(|args| args.otlp.endpoint = Some("http://c:1/own/path".into()));
        assert_eq!(whole.unwrap().unwrap().endpoint, "http://c:1/own/path");
    }

    #[test]
    fn a_flag_goes_before_the_variable_about_traces() {
        let both = of(|args| {
            args.otlp_endpoint = Some("http://flag:1".into());
            args.otlp.endpoint = Some("http://variable:1".into());
        });
        assert_eq!(both.unwrap().unwrap().endpoint, "http://flag:1/v1/traces");
    }

    #[test]
    fn what_is_no_url_is_refused_by_name() {
        for wrong in
            ["localhost:4318", "grpc://c:4317", "http://", "http://c:4318?x=1", "/v1", "http://a b"]
        {
            let error = endpoint(wrong).unwrap_err();
            assert!(error.starts_with("--otlp-endpoint: ") && error.ends_with(REMEDY), "{error}");
        }
        let secret = endpoint("http://user:pass@c:4318").unwrap_err();
        assert!(secret.contains("OTEL_EXPORTER_OTLP_HEADERS") && !secret.contains("pass"));
        let error = of(|args| args.otlp.endpoint = Some("c:4318".into())).unwrap_err();
        assert!(error.starts_with("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: "), "{error}");
    }

    #[test]
    fn other_forms_times_and_shares_are_refused() {
        let with = |change: fn(&mut RouterArgs)| {
            of(|args| {
                args.otlp_endpoint = Some("http://c:4318".into());
                change(args);
            })
        };
        let grpc = with(|args| args.otlp.protocol = Some((PROTOCOLS[1], "grpc".into())));
        assert!(grpc.unwrap_err().starts_with("OTEL_EXPORTER_OTLP_PROTOCOL: "));
        for wrong in ["0", "soon", "-1", "600001"] {
            let mut config =
                RouterArgs { otlp_endpoint: Some("http://c:1".into()), ..RouterArgs::default() };
            config.otlp = TracesVariables::default();
            config.otlp.timeout_ms = Some((TIMEOUTS[0], wrong.into()));
            let error = TracesConfig::check(&config).unwrap_err().to_string();
            assert!(error.starts_with(TIMEOUTS[0]), "{error}");
        }
        for wrong in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let error = of(|args| args.otlp_sample_ratio = wrong).unwrap_err();
            assert!(error.starts_with("--otlp-sample-ratio: "), "{error}");
        }
        let spoken = with(|args| {
            args.otlp.protocol = Some((PROTOCOLS[0], PROTOCOL.into()));
            args.otlp.timeout_ms = Some((TIMEOUTS[1], "250".into()));
        });
        assert_eq!(spoken.unwrap().unwrap().timeout, Duration::from_millis(250));
    }
}
