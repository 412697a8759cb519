//! `bench compare`: two reports, or two lists of them, side by side.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::BadInput;

/// Two results of `load`, `replay`, `sim` or `make bench-routing`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CompareArgs {
    /// Report of the run to compare with.
    a: PathBuf,
    /// Report of the run that may have got worse.
    b: PathBuf,
    /// A change by less than this many percent is no change.
    #[arg(long, value_name = "PERCENT", default_value_t = 3.0)]
    tolerance: f64,
    /// Exit status 1 if something got worse.
    #[arg(long)]
    check: bool,
}

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Better {
    Less,
    More,
}

/// What is compared, by its place in a report.
const MEASURES: [(&str, Better); 19] = [
    ("errors", Better::Less),
    ("requests_per_s", Better::More),
    ("tokens_per_s", Better::More),
    ("goodput.share", Better::More),
    ("goodput.per_s", Better::More),
    ("token_hit_rate", Better::More),
    ("imbalance", Better::Less),
    ("ttft_ms.mean", Better::Less),
    ("ttft_ms.p50", Better::Less),
    ("ttft_ms.p90", Better::Less),
    ("ttft_ms.p99", Better::Less),
    ("tpot_ms", Better::Less),
    ("tpot_quantiles_ms.p99", Better::Less),
    ("itl_ms.p50", Better::Less),
    ("itl_ms.p99", Better::Less),
    ("e2e_ms.mean", Better::Less),
    ("e2e_ms.p50", Better::Less),
    ("e2e_ms.p99", Better::Less),
    ("client_cpu_s", Better::Less),
];

/// Prints the table; the number of measures that got worse.
///
/// # Errors
/// A file is no report, or the two have no run in common.
pub(crate) fn run(args: &CompareArgs) -> anyhow::Result<usize> {
    let (a, b) = (read(&args.a)?, read(&args.b)?);
    let (table, worse) = compare(&a, &b, args.tolerance / 100.0)?;
    crate::print(&table);
    Ok(if args.check { worse } else { 0 })
}

/// The reports of a file, by what was run.
fn read(path: &Path) -> Result<BTreeMap<String, Value>, BadInput> {
    let bad = |why: String| BadInput(format!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
    let reports = match value {
        Value::Array(reports) => reports,
        one @ Value::Object(_) => vec![one],
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            return Err(bad("neither a report nor a list of reports".into()));
        }
    };
    let alone = reports.len() == 1;
    let mut named = BTreeMap::new();
    for report in reports {
        if !report["requests"].is_u64() {
            return Err(bad("not a report: it has no number of `requests`".into()));
        }
        let parts = ["trace", "policy", "mode"].map(|part| report[part].as_str().unwrap_or("-"));
        let scope = report["scope"].as_str().map_or(String::new(), |scope| format!(" / {scope}"));
        // Two single reports are compared whatever they are of.
        let name = if alone { String::new() } else { parts.join(" / ") + &scope };
        named.insert(name, report);
    }
    Ok(named)
}

fn compare(
    a: &BTreeMap<String, Value>,
    b: &BTreeMap<String, Value>,
    tolerance: f64,
) -> Result<(String, usize), BadInput> {
    let (mut table, mut worse) = (String::new(), 0);
    for (name, before) in a {
        let Some(after) = b.get(name) else { continue };
        if !name.is_empty() {
            let _ = writeln!(table, "\n{name}");
        }
        let _ = writeln!(table, "{:22}{:>14}{:>14}{:>10}", "", "a", "b", "b / a");
        for (measure, better) in MEASURES {
            let (Some(x), Some(y)) = (number(before, measure), number(after, measure)) else {
                continue;
            };
            let mark = match verdict(x, y, better, tolerance) {
                Some(true) => "  better",
                Some(false) => "  WORSE",
                None => "",
            };
            worse += usize::from(mark == "  WORSE");
            let ratio = if x == 0.0 { "-".to_owned() } else { format!("{:.3}", y / x) };
            let _ = writeln!(table, "{measure:22}{:>14}{:>14}{ratio:>10}{mark}", show(x), show(y));
        }
    }
    if table.is_empty() {
        return Err(BadInput("the two files have no trace, policy and mode in common".into()));
    }
    let _ = writeln!(table, "\n{worse} worse");
    Ok((table.trim_start().to_owned(), worse))
}

/// True if `after` is better, false if it is worse, `None` within the tolerance.
fn verdict(before: f64, after: f64, better: Better, tolerance: f64) -> Option<bool> {
    if (after - before).abs() <= tolerance * before.abs() {
        return None;
    }
    Some((after < before) == (better == Better::Less))
}

fn number(report: &Value, measure: &str) -> Option<f64> {
    measure.split('.').try_fold(report, |value, part| value.get(part))?.as_f64()
}

fn show(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        large if large >= 1000.0 => format!("{value:.0}"),
        medium if medium >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn named(name: &str, report: Value) -> BTreeMap<String, Value> {
        BTreeMap::from([(name.to_owned(), report)])
    }

    #[test]
    fn what_got_worse_is_marked_whichever_way_is_better() {
        let a = json!({"requests": 9, "errors": 0, "requests_per_s": 10.0, "ttft_ms": {"p50": 100.0, "p99": 5.0}});
        let b = json!({"requests": 9, "errors": 1, "requests_per_s": 8.0, "ttft_ms": {"p50": 50.0, "p99": 5.1}});
        let (table, worse) = compare(&named("", a), &named("", b), 0.03).unwrap();
        assert_eq!(worse, 2, "{table}");
        let line =
            |name: &str| table.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        assert!(line("requests_per_s").ends_with("0.800  WORSE"));
        assert!(line("ttft_ms.p50").ends_with("0.500  better"));
        assert!(line("ttft_ms.p99").ends_with("1.020"), "within the tolerance");
        assert!(line("errors").ends_with("-  WORSE"));
    }

    #[test]
    fn lists_are_matched_by_what_was_run() {
        let report = |policy: &str| json!({"trace": "t", "policy": policy, "mode": "live", "requests": 1, "errors": 0});
        let folder = std::env::temp_dir().join(format!("headrace-compare-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, value: Value| {
            let path = folder.join(name);
            std::fs::write(&path, value.to_string()).unwrap();
            path
        };
        let a = read(&file("a", json!([report("kv"), report("round-robin")]))).unwrap();
        let b = read(&file("b", json!([report("kv"), report("least-loaded")]))).unwrap();
        let (table, _) = compare(&a, &b, 0.0).unwrap();
        assert!(table.contains("t / kv / live") && !table.contains("robin"), "{table}");
        let other = named("x", report("kv"));
        assert!(compare(&a, &other, 0.0).is_err());
        for bad in [json!(3), json!({"x": 1}), json!([{"requests": "many"}])] {
            assert!(read(&file("bad", bad)).is_err());
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
