use clap::Parser;
use serde_json::Value;

use super::*;
use crate::trace::Row;

mod groups;
mod split;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    sim: SimArgs,
}

/// Conversations with a prefix each, some requests long, at one a second.
fn requests(conversations: u64, turns: u64) -> Requests {
    let row = |number: u64| {
        let (conversation, turn) = (number % conversations, number / conversations);
        let blocks = (0..4 + turn).map(|place| conversation * 1_000 + place).collect::<Vec<_>>();
        Row {
            at_ms: number as f64 * 1e3,
            input_tokens: 16 * u32::try_from(blocks.len()).unwrap() - 3,
            output_tokens: 8,
            blocks,
            session: Some(conversation.to_string()),
        }
    };
    let rows = (0..conversations * turns).map(row).collect();
    Requests { name: "made up".into(), block_tokens: 16, rows }
}

const COST: &str = "TRACE --cost 20,2,0.001,0.5,0.001 --blocks 200 --batched-tokens 256";

fn sim(flags: &str, requests: &Requests) -> Value {
    let args = ["sim"].into_iter().chain(COST.split_whitespace()).chain(flags.split_whitespace());
    let args = Flags::parse_from(args).sim;
    let mut report = serde_json::to_value(simulate(&args, requests).unwrap()).unwrap();
    report["run_s"] = Value::Null;
    report
}

#[test]
fn every_request_is_answered_and_the_same_seed_tells_the_same_story() {
    let trace = requests(10, 8);
    let report = sim("--workers 4 --policy kv", &trace);
    assert_eq!((&report["requests"], &report["errors"]), (&80.into(), &0.into()));
    assert_eq!(report["completion_tokens"], 80 * 8);
    assert_eq!(report["mode"], "sim");
    assert_eq!(report, sim("--workers 4 --policy kv", &trace));
    assert_ne!(report["ttft_ms"], sim("--workers 4 --policy kv --seed 2", &trace)["ttft_ms"]);
}

#[test]
fn what_workers_hold_is_found_again() {
    let trace = requests(10, 8);
    let hits = |policy| {
        sim(&format!("--workers 3 --policy {policy}"), &trace)["token_hit_rate"].as_f64().unwrap()
    };
    assert!(hits("kv") > 0.6, "{}", hits("kv"));
    assert!(hits("kv") > hits("round-robin") + 0.2);
}

#[test]
fn the_speed_follows_from_the_share_of_the_fleet_that_is_asked_for() {
    let trace = requests(10, 8);
    let speed = |flags| sim(flags, &trace)["speed"].as_f64().unwrap();
    let half = speed("--workers 2 --util 0.5");
    assert!((speed("--workers 4 --util 0.5") / half - 2.0).abs() < 1e-9);
    assert!((speed("--workers 2 --util 0.25") / half - 0.5).abs() < 1e-9);
    let busy = sim("--workers 2 --policy round-robin --util 3", &trace);
    let idle = sim("--workers 2 --policy round-robin --util 0.05", &trace);
    let ttft = |report: &Value| report["ttft_ms"]["mean"].as_f64().unwrap();
    assert!(ttft(&busy) > 1.2 * ttft(&idle));
}

#[test]
fn a_smaller_trace_takes_the_same_time() {
    let mut trace = requests(10, 8);
    trace.block_tokens = 512;
    for row in &mut trace.rows {
        row.input_tokens = 512 * u32::try_from(row.blocks.len()).unwrap() - 96;
    }
    let cost = "--cost 20,0.05,1e-6,0.5,1e-5 --batched-tokens 8192 --workers 2 --noise 0";
    let run = |flags: &str| {
        let args = format!("sim TRACE --blocks 200 {cost} {flags}");
        let args = Flags::parse_from(args.split_whitespace()).sim;
        serde_json::to_value(simulate(&args, &trace).unwrap()).unwrap()
    };
    let (whole, small) = (run(""), run("--scale 32"));
    for measure in ["/ttft_ms/mean", "/token_hit_rate", "/e2e_ms/mean"] {
        let of = |report: &Value| report.pointer(measure).unwrap().as_f64().unwrap();
        assert!((of(&small) / of(&whole) - 1.0).abs() < 0.05, "{measure}: {whole:#} {small:#}");
    }
}

#[test]
fn requests_of_a_worker_that_dies_go_on_elsewhere() {
    let trace = requests(10, 8);
    let report = sim("--workers 3 --fault w1:die@20s-60s --fault w2:die@0-10s", &trace);
    assert_eq!(report["errors"], 0);
    let dead = sim("--workers 3 --fault w1:die@0", &trace);
    assert!(dead["uncached_tokens_by_worker"]["w1"].is_null());
    assert!(dead["imbalance"].as_f64().unwrap() > 1.3, "a third of the fleet is idle");
    let none = sim("--workers 2 --fault die@0-15s", &trace);
    let refused = none["errors"].as_u64().unwrap();
    assert!((14..=16).contains(&refused), "one a second, until they come: {refused}");
}

#[test]
fn a_frozen_worker_keeps_what_it_began_or_loses_it() {
    let trace = requests(10, 8);
    let short = sim("--workers 2 --policy round-robin --fault w0:freeze@20s-22s", &trace);
    assert_eq!(short["errors"], 0);
    assert!(short["ttft_ms"]["max"].as_f64().unwrap() > 1_000.0, "somebody waited");
    let long = sim("--workers 2 --fault w0:freeze@20s", &trace);
    assert_eq!(long["errors"], 0, "{long:#}");
}

#[test]
fn bad_events_cost_hits_and_nothing_else() {
    let trace = requests(10, 8);
    for fault in [
        "drop-events=0.3",
        "stop-events",
        "gap@10s",
        "wrong-epoch@10s",
        "duplicate-stores",
        "unknown-removes",
        "overclaim",
        "lie=50%",
        "forget=0.5",
        "w0:slow=3x@10s-30s",
    ] {
        let report = sim(&format!("--workers 3 --fault {fault}"), &trace);
        assert_eq!(report["errors"], 0, "{fault}");
        assert_eq!(report["completion_tokens"], 80 * 8, "{fault}");
    }
}

#[test]
fn logged_decisions_come_out_the_same_and_a_changed_one_does_not() {
    let log = std::env::temp_dir().join(format!("headrace-decisions-{}", std::process::id()));
    let flags = format!("--workers 3 --shadow least-loaded --decisions {}", log.display());
    sim(&flags, &requests(10, 8));
    again::run(&log).unwrap();
    let text = std::fs::read_to_string(&log).unwrap();
    assert_eq!(text.lines().count(), 80);
    std::fs::write(&log, text.replacen("\"winner\":1", "\"winner\":77", 1)).unwrap();
    let error = again::run(&log).unwrap_err();
    assert!(error.to_string().starts_with("1 of 80"), "{error}");
    std::fs::write(&log, "{}\n").unwrap();
    let error = again::run(&log).unwrap_err().to_string();
    assert!(error.contains(":1: missing field"), "{error}");
    std::fs::remove_file(&log).unwrap();
}

/// Two requests a second for ten minutes, then twenty a second for five, then none but a few.
fn step_in_load() -> Requests {
    let times = (0..1_200).map(|i| f64::from(i) * 500.0);
    let times = times.chain((0..6_000).map(|i| 600e3 + f64::from(i) * 50.0));
    let times = times.chain((0..120).map(|i| 900e3 + f64::from(i) * 10e3));
    let rows = times.enumerate().map(|(number, at_ms)| Row {
        at_ms,
        input_tokens: 64,
        output_tokens: 8,
        blocks: (0..4).map(|place| number as u64 * 8 + place).collect(),
        session: None,
    });
    Requests { name: "a step in load".into(), block_tokens: 16, rows: rows.collect() }
}

#[test]
fn a_fleet_that_follows_the_need_grows_with_the_load_and_shrinks_after_it() {
    let flags = "--workers 8 --autoscale 1 --autoscale-start-s 30 --slo ttft=1s";
    let scaled = sim(flags, &step_in_load());
    assert_eq!(scaled, sim(flags, &step_in_load()), "the same each time");
    let (fixed, least) =
        (sim("--workers 8 --slo ttft=1s", &step_in_load()), sim("--workers 1", &step_in_load()));
    let did = &scaled["autoscaled"];
    let peak = did["peak_workers"].as_u64().unwrap();
    assert!((3..=6).contains(&peak), "{did}");
    let mean = did["mean_workers"].as_f64().unwrap();
    assert!(1.0 < mean && mean < 3.0, "{did}");
    assert_eq!(did["started"].as_u64().unwrap(), peak - 1, "{did}");
    assert!(did["stopped"].as_u64().unwrap() >= peak - 2, "{did}");
    let hours = mean * scaled["wall_s"].as_f64().unwrap() / 3_600.0;
    assert!((did["worker_hours"].as_f64().unwrap() - hours).abs() < 1e-9, "{did}");
    // nobody fails, also where workers drain, and the wait is that of neither fleet
    assert_eq!((&scaled["errors"], &fixed["autoscaled"]), (&Value::from(0), &Value::Null));
    let ttft = |report: &Value| report["ttft_ms"]["mean"].as_f64().unwrap();
    assert!(ttft(&fixed) < ttft(&scaled), "{} {}", ttft(&fixed), ttft(&scaled));
    assert!(least["errors"].as_u64().unwrap() > 0 || ttft(&scaled) < ttft(&least) / 5.0);
}

#[test]
fn fleets_that_no_autoscaler_is_for_are_refused_by_name() {
    for (flags, why) in [
        ("--workers 2 --autoscale 3", "3 is more than --workers 2"),
        ("--prefill 1 --decode 1 --autoscale 1", "--workers alone"),
        ("--workers 4 --ep 2 --autoscale 2", "--workers alone"),
        ("--workers 2 --autoscale 1 --routers 2", "--routers"),
        ("--workers 2 --autoscale 1 --fault w0:die@0-60s", "--fault"),
    ] {
        let args =
            ["sim"].into_iter().chain(COST.split_whitespace()).chain(flags.split_whitespace());
        let error = simulate(&Flags::parse_from(args).sim, &requests(2, 2)).unwrap_err();
        assert!(error.to_string().contains(why), "{flags}: {error}");
    }
    for wrong in ["0", "-1", "x", ""] {
        let args = ["sim", "TRACE", "--workers", "2", "--autoscale", wrong];
        assert!(Flags::try_parse_from(args).is_err(), "{wrong}");
    }
    let alone = ["sim", "TRACE", "--autoscale-start-s", "3"];
    assert!(Flags::try_parse_from(alone).is_err(), "it says nothing without --autoscale");
}

#[test]
fn a_worker_that_was_stopped_while_it_started_starts_anew() {
    // ten a second for a minute, nothing for long enough to stop what starts, and ten a second again
    let burst =
        |from_s: f64, s: u32| (0..10 * s).map(move |i| (from_s + f64::from(i) / 10.0) * 1e3);
    let rows = burst(0.0, 60).chain(burst(400.0, 500)).enumerate().map(|(number, at_ms)| Row {
        at_ms,
        input_tokens: 64,
        output_tokens: 8,
        blocks: (0..4).map(|place| number as u64 * 8 + place).collect(),
        session: None,
    });
    let requests = Requests { name: "two bursts".into(), block_tokens: 16, rows: rows.collect() };
    let flags = "--workers 2 --autoscale 1 --autoscale-start-s 600 --autoscale-idle-s 60";
    let report = sim(flags, &requests);
    let did = &report["autoscaled"];
    assert!(did["started"].as_u64() >= Some(2) && did["stopped"].as_u64() >= Some(1), "{did}");
    // it was started again at 400 s at the earliest, and the last request comes at 900 s
    let by_worker = report["uncached_tokens_by_worker"].as_object().unwrap();
    assert_eq!(by_worker.keys().collect::<Vec<_>>(), ["w0"], "{did}");
}
