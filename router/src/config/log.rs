//! What is logged. `tracing` takes any word that is no level for the name of a target and then logs nothing else, so a
//! level that is misspelt would silence the log: here a target needs its level.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::{ConfigError, LogConfig, flag, flag_or_variable};

pub(super) fn check(level: &str, format: &str) -> Result<LogConfig, ConfigError> {
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
    Ok(LogConfig { filter, json })
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

    #[test]
    fn a_word_that_is_no_level_is_refused_and_does_not_silence_the_log() {
        for wrong in ["foo", "warnign", "info,foo", "foo,h2=debug", "headrace_router", "info,h2=x"]
        {
            let error = check(wrong, "text").unwrap_err().to_string();
            assert!(error.starts_with("--log-level: ") && error.contains(wrong), "{error}");
            assert!(error.contains("; take error, warn,"), "{error}");
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
            assert_eq!(check(level, "text").unwrap().filter, filter);
        }
    }
}
