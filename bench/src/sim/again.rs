//! `sim --replay`: the decisions of a router's log, made again from what it knew then.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use anyhow::bail;
use headrace_router::core::decision::{Decision, replay};
use serde_json::json;

use crate::BadInput;

/// Differences that are shown.
const SHOWN: usize = 5;

/// Makes each decision again and compares the bytes.
///
/// # Errors
/// The file cannot be read, a line is no decision, or one came out otherwise.
pub(super) fn run(path: &Path) -> anyhow::Result<()> {
    let name = path.display();
    let file = File::open(path).map_err(|error| BadInput(format!("{name}: {error}")))?;
    let (mut same, mut different) = (0_usize, Vec::new());
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let bad = |error: &dyn std::fmt::Display| BadInput(format!("{name}:{number}: {error}"));
        let line = line.map_err(|error| bad(&error))?;
        if line.trim().is_empty() {
            continue;
        }
        let logged: Decision = serde_json::from_str(&line).map_err(|error| bad(&error))?;
        let again = replay(&logged);
        if serde_json::to_string(&again)? == line {
            same += 1;
        } else {
            different.push(json!({
                "line": number, "request": logged.request, "logged": logged.winner, "again": again.winner,
            }));
        }
    }
    let differ = different.len();
    different.truncate(SHOWN);
    let report = json!({
        "decisions": same + differ, "same": same, "different": differ, "first_different": different,
    });
    crate::print_json(&report);
    if differ > 0 {
        bail!("{differ} of {} decisions came out otherwise", same + differ);
    }
    Ok(())
}
