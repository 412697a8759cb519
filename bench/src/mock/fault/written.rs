//! How a fault is written: `[WORKERS:]KIND[=VALUE][@FROM[-UNTIL]]`, as `w3:die@10s`, `w0-w3:slow=3x@5s-20s` or
//! `drop-events=0.1`. Times count from the start of the fleet.

use std::ops::RangeInclusive;
use std::str::FromStr;

use super::{Fault, FaultKind, Phase};
use crate::report::sample::time_ms;

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (what, when) =
            text.split_once('@').map_or((text, None), |(what, when)| (what, Some(when)));
        let (workers, kind) = match what.split_once(':') {
            Some((workers, kind)) => (range(workers.trim())?, kind.trim()),
            None => (0..=usize::MAX, what.trim()),
        };
        let (name, value) =
            kind.split_once('=').map_or((kind, None), |(name, value)| (name, Some(value.trim())));
        let (from, until) = match when {
            None => (0.0, f64::INFINITY),
            Some(when) => match when.split_once('-') {
                None => (start_ms(when)?, f64::INFINITY),
                Some((from, until)) => (start_ms(from)?, start_ms(until)?),
            },
        };
        let kind = FaultKind::named(name.trim(), value)?;
        if until <= from {
            return Err(format!("`{text}` ends before it begins"));
        }
        Ok(Self { workers, kind, from_ms: from, until_ms: until })
    }
}

impl FaultKind {
    fn named(name: &str, value: Option<&str>) -> Result<Self, String> {
        let needed = || value.ok_or_else(|| format!("`{name}` needs a value: {name}=..."));
        let share = |text: &str| {
            let (text, unit) = text.strip_suffix('%').map_or((text, 1.0), |text| (text, 0.01));
            let share = text.parse::<f64>().ok().map(|share| share * unit);
            let share = share.filter(|share| (-1.0..=1.0).contains(share));
            share.ok_or_else(|| format!("`{name}`: {text} is no share such as 0.1 or 10%"))
        };
        let probability = |text: &str| {
            let share = share(text)?;
            if share > 0.0 { Ok(share) } else { Err(format!("`{name}`: {text} is not above 0")) }
        };
        let times = |text: &str| {
            let times = text.strip_suffix('x').unwrap_or(text).parse::<f64>().ok();
            let times = times.filter(|times| *times > 0.0 && *times <= 1e6);
            times.ok_or_else(|| format!("`{name}`: {text} is not `3x`"))
        };
        let kind = match name {
            "slow" => return Ok(Self::Slow(times(needed()?)?)),
            "slow-transfer" => return Ok(Self::SlowTransfer(times(needed()?)?)),
            "fail-transfer" => return Ok(Self::FailTransfer(probability(needed()?)?)),
            "drop-events" => return Ok(Self::DropEvents(probability(needed()?)?)),
            "lie" => return Ok(Self::Lie(share(needed()?)?)),
            "forget" => return Ok(Self::Forget(probability(needed()?)?)),
            "stall" => return Ok(Self::Stall(phase(needed()?)?)),
            "wrong-size" => Self::WrongSize,
            "wrong-weights" => Self::WrongWeights,
            "die" => Self::Die,
            "freeze" => Self::Freeze,
            "stop-events" => Self::StopEvents,
            "overclaim" => Self::Overclaim,
            "gap" => Self::Gap,
            "wrong-epoch" => Self::WrongEpoch,
            "duplicate-stores" => Self::DuplicateStores,
            "unknown-removes" => Self::UnknownRemoves,
            _ => {
                return Err(format!(
                    "`{name}` is no fault; there are die, freeze, stall=PHASE, wrong-size, wrong-weights, slow=3x, \
                     drop-events=0.1, stop-events, lie=+50%, \
                     forget=0.5, overclaim, gap, wrong-epoch, duplicate-stores, unknown-removes, slow-transfer=10x, \
                     fail-transfer=0.5"
                ));
            }
        };
        match value {
            None => Ok(kind),
            Some(value) => Err(format!("`{name}` takes no value, got {value}")),
        }
    }
}

fn phase(text: &str) -> Result<Phase, String> {
    match text {
        "agree" => Ok(Phase::Agree),
        "dispatch" => Ok(Phase::Dispatch),
        "combine" => Ok(Phase::Combine),
        "draft" => Ok(Phase::Draft),
        _ => Err(format!("`stall`: {text} is not agree, dispatch, combine or draft")),
    }
}

/// `w3`, `w0-w7` or `*`.
fn range(text: &str) -> Result<RangeInclusive<usize>, String> {
    let number = |text: &str| {
        let digits = text.trim_start_matches(|c: char| !c.is_ascii_digit());
        digits
            .parse::<usize>()
            .map_err(|_| format!("`{text}` names no worker; write w3, w0-w7 or *"))
    };
    if text == "*" {
        return Ok(0..=usize::MAX);
    }
    match text.rsplit_once('-').filter(|(first, _)| first.ends_with(|c: char| c.is_ascii_digit())) {
        None => number(text).map(|number| number..=number),
        Some((first, last)) => Ok(number(first)?..=number(last)?),
    }
}

fn start_ms(text: &str) -> Result<f64, String> {
    if text.trim() == "0" { Ok(0.0) } else { time_ms(text.trim()) }
}
