//! What is logged and measured, and in whose words. `tracing` takes any word that is no level for the name of a target and
//! then logs nothing else, so a level that is misspelt would silence the log: here a target needs its level.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::args::VLLM;
use super::{ConfigError, LogConfig, RouterArgs, flag, flag_or_variable};

/// Most lines about requests a second that can be asked for. A guess: no disk of a log wants more.
const MOST_LINES: u32 = 1_000_000;

pub(super) fn check(args: &RouterArgs) -> Result<LogConfig, ConfigError> {
    let (level, format, requests_per_s) =
        (args.log_level.as_str(), args.log_format.as_str(), args.log_requests_per_s);
    if requests_per_s > MOST_LINES {
        let problem = format!("{requests_per_s} lines a second are too many");
        return Err(flag("log-requests-per-s", problem, "take at most 1000000; 0 writes none"));
    }
    let wrong = |why: &str| {
        let remedy = "take error, warn, info, debug, trace or off, or for parts of it such as \
            info,headrace_router::fleet=debug";
        let problem = format!("{level:?} is not a filter ({why})");
        flag_or_variable("log-level", "HEADRACE_LOG", level, problem, remedy)
    };
    let filter = filter(level).map_err(|why| wrong(&why))?;
    EnvFilter::try_new(&filter).map_err(|error| wrong(&error.to_string()))?;
    let json = match format {
        "text" => false,
        "json" => true,
        _ => {
            return Err(flag(
                "log-format",
                format!("{format:?} is neither text nor json"),
                "take text or json",
            ));
        }
    };
    Ok(LogConfig { filter, json, requests_per_s, prompts: args.log_prompts })
}

/// Whether metrics are shown under vLLM's names, too.
pub(super) fn vllm_metrics(args: &RouterArgs) -> Result<bool, ConfigError> {
    match args.metrics_compat.as_deref() {
        None => Ok(false),
        Some(VLLM) => Ok(true),
        Some(other) => {
            let problem = format!("there are no metrics as {other:?} has them");
            Err(flag("metrics-compat", problem, "take vllm"))
        }
    }
}

/// The same filter with the names of levels as `tracing` has them.
fn filter(text: &str) -> Result<String, String> {
    if text.contains('[') {
        return Ok(text.to_owned()); // spans, whose fields have commas between them, too
    }
    let parts = text.split(',').map(|part| match part.trim().rsplit_once('=') {
        Some((target, level)) => Ok(format!("{target}={}", name(level))),
        None if name(part.trim()).parse::<LevelFilter>().is_ok() => {
            Ok(name(part.trim()).to_owned())
        }
        None => Err(format!("{:?} is not a level", part.trim())),
    });
    Ok(parts.collect::<Result<Vec<_>, _>>()?.join(","))
}

/// Python says `warning`.
fn name(level: &str) -> &str {
    if level.eq_ignore_ascii_case("warning") { "warn" } else { level }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_level(level: &str) -> Result<LogConfig, ConfigError> {
        check(&RouterArgs { log_level: level.into(), ..RouterArgs::default() })
    }

    #[test]
    fn requests_have_some_lines_a_second_and_prompts_are_in_none_unless_asked_for() {
        let config = check(&RouterArgs::default()).unwrap();
        assert_eq!((config.requests_per_s, config.prompts, config.json), (20, false, false));
        let many = RouterArgs { log_requests_per_s: 1_000_001, ..RouterArgs::default() };
        let error = check(&many).unwrap_err().to_string();
        assert!(error.starts_with("--log-requests-per-s: 1000001"), "{error}");
    }

    #[test]
    fn a_word_that_is_no_level_is_refused_and_does_not_silence_the_log() {
        for wrong in ["foo", "warnign", "info,foo", "foo,h2=debug", "headrace_router", "info,h2=x"]
        {
            let error = of_level(wrong).unwrap_err().to_string();
            assert!(error.starts_with("--log-level: ") && error.contains(wrong), "{error}");
            assert!(error.contains("; take error, warn,"), "{error}");
        }
    }

    #[test]
    fn metrics_have_the_names_of_a_server_that_is_known() {
        let of = |server: Option<&str>| {
            vllm_metrics(&RouterArgs {
                metrics_compat: server.map(Into::into),
                ..RouterArgs::default()
            })
        };
        assert!(!of(None).unwrap() && of(Some("vllm")).unwrap());
        for wrong in ["", "sglang", "VLLM"] {
            let error = of(Some(wrong)).unwrap_err().to_string();
            assert!(
                error.starts_with("--metrics-compat: ") && error.ends_with("take vllm"),
                "{error}"
            );
        }
    }

    #[test]
    fn levels_are_those_of_rust_and_of_python() {
        for (level, filter) in [
            ("warning", "warn"),
            ("WARNING", "warn"),
            ("INFO", "INFO"),
            ("off", "off"),
            ("", ""),
            ("info, h2=warning", "info,h2=warn"),
            ("info,[request{a}]=debug", "info,[request{a}]=debug"),
            ("[request]", "[request]"),
        ] {
            assert_eq!(of_level(level).unwrap().filter, filter);
        }
    }
}
