use headrace_router::core::frame::RequestId;

use super::*;
use crate::mock::engine::{Leg, Scores};
use crate::mock::preset::tests::model_args;

fn fault(text: &str) -> Fault {
    text.parse().unwrap()
}

#[test]
fn faults_are_read_with_workers_value_and_time() {
    let expected =
        Fault { workers: 3..=3, kind: FaultKind::Die, from_ms: 10_000.0, until_ms: f64::INFINITY };
    assert_eq!(fault("w3:die@10s"), expected);
    let slow = fault("w0-w3:slow=3x@500ms-20s");
    assert_eq!((slow.workers, slow.kind), (0..=3, FaultKind::Slow(3.0)));
    assert_eq!((slow.from_ms, slow.until_ms), (500.0, 20_000.0));
    assert_eq!(fault("drop-events=10%").kind, FaultKind::DropEvents(0.1));
    assert_eq!(fault("*:lie=+50%@0").kind, FaultKind::Lie(0.5));
    assert_eq!(fault("my-fleet-w12:gap").workers, 12..=12);
    assert_eq!(fault("w2:slow-transfer=10x").kind, FaultKind::SlowTransfer(10.0));
    assert_eq!(fault("fail-transfer=0.5").kind, FaultKind::FailTransfer(0.5));
    for bad in [
        "slow-transfer",
        "fail-transfer=0",
        "",
        "w3",
        "w3:",
        "w3:explode",
        "w3:die=1",
        "slow",
        "slow=x",
        "slow=-1x",
        "lie=200%",
        "w:die",
        "die@",
        "die@soon",
        "die@5s-4s",
        "drop-events=0",
        "drop-events=-1",
    ] {
        assert!(bad.parse::<Fault>().is_err(), "{bad}");
    }
}

#[test]
fn transfers_from_a_worker_are_slow_or_fail() {
    let mut mischief = Mischief::new(0, 0);
    assert_eq!(mischief.ills(0.0), Ills { slow: 1.0, fails: false });
    mischief.add(&fault("slow-transfer=10x@1s"));
    mischief.add(&fault("fail-transfer=0.3@1s"));
    let ills: Vec<_> = (0..100).map(|_| mischief.ills(2_000.0)).collect();
    assert!(ills.iter().all(|ills| ills.slow == 10.0));
    let failed = ills.iter().filter(|ills| ills.fails).count();
    assert!((15..45).contains(&failed), "{failed}");
}

#[test]
fn a_worker_does_only_its_own_mischief_and_only_in_time() {
    let faults = ["w1:freeze@5s-7s", "w1-w2:slow=3x@6s", "w2:die@6s-8s"].map(fault);
    let of = |number| {
        let mut mischief = Mischief::new(number, 0);
        faults.iter().for_each(|fault| mischief.add(fault));
        mischief
    };
    let one = of(1);
    assert_eq!(one.health(4_999.0), Health::Working);
    assert_eq!(one.health(5_000.0), Health::Frozen);
    assert_eq!(one.next_change_ms(5_000.0), 6_000.0);
    assert_eq!(one.health(7_000.0), Health::Working);
    assert_eq!((one.slowdown(5_999.0), one.slowdown(6_000.0)), (1.0, 3.0));
    assert_eq!(of(2).health(6_000.0), Health::Dead);
    assert_eq!(of(2).health(8_000.0), Health::Working);
    assert_eq!(of(0).next_change_ms(0.0), f64::INFINITY);
}

#[test]
fn a_lie_stays_below_the_prompt() {
    let mut mischief = Mischief::new(0, 0);
    mischief.add(&fault("lie=+50%@1s"));
    assert_eq!((mischief.lie(0.0), mischief.lie(1e3)), (0.0, 0.5));
    let mut engine = Engine::new(model_args("--block-tokens 16 --blocks 64").engine().unwrap());
    engine.claim_more(0.5);
    for (request, said) in [(1, 50), (2, 99)] {
        let keys = (1..=6).collect();
        let request = RequestId(request);
        engine
            .submit(Leg {
                request,
                keys,
                prompt_tokens: 100,
                max_tokens: 1,
                ends_after: None,
                seed: 1,
                resumed: 0,
                kv_transfer: None,
                arrives: None,
                scores: Scores::default(),
                scripted: None,
                pooled: None,
            })
            .unwrap();
        engine.begin_step().unwrap();
        assert_eq!(engine.end_step(1.0).step.outputs[0].cached_tokens, Some(said));
    }
}

/// What an engine that served one prompt of 32 blocks says to the router.
fn event(engine: &mut Engine) -> Blocks {
    let keys = (1..=32).collect();
    let leg = Leg {
        request: RequestId(1),
        keys,
        prompt_tokens: 512,
        max_tokens: 1,
        ends_after: None,
        seed: 1,
        resumed: 0,
        kv_transfer: None,
        arrives: None,
        scores: Scores::default(),
        scripted: None,
        pooled: None,
    };
    engine.submit(leg).unwrap();
    engine.begin_step().unwrap();
    engine.end_step(1.0).blocks.unwrap()
}

fn tampered(text: &str) -> (Option<Blocks>, Engine) {
    let mut engine = Engine::new(model_args("--block-tokens 16 --blocks 64").engine().unwrap());
    let blocks = event(&mut engine);
    let mut mischief = Mischief::new(0, 7);
    mischief.add(&fault(text));
    (mischief.blocks(1.0, blocks, &mut engine), engine)
}

#[test]
fn each_fault_does_what_it_says() {
    let (honest, _) = tampered("w5:overclaim");
    let honest = honest.unwrap();
    assert_eq!((honest.sequence, stored(&honest).len()), (1, 32));
    assert!(tampered("stop-events").0.is_none());
    assert!(tampered("drop-events=1").0.is_none());
    assert_eq!(tampered("gap").0.unwrap().sequence, 2);
    assert_eq!(tampered("wrong-epoch").0.unwrap().epoch, honest.epoch + 1);
    assert_eq!(stored(&tampered("duplicate-stores").0.unwrap()).len(), 64);
    assert_eq!(tampered("unknown-removes").0.unwrap().removed.len(), 8 * MADE_UP_KEYS);
    assert_eq!(stored(&tampered("overclaim").0.unwrap()).len(), 32 + MADE_UP_KEYS);
    let (said, mut engine) = tampered("forget=0.5");
    assert_eq!(stored(&said.unwrap()).len(), 32);
    assert!((8..=24).contains(&engine.snapshot().1.len()), "half is gone");
}

#[test]
fn a_hole_stays_in_the_numbers_and_comes_once() {
    let mut engine = Engine::new(model_args("--block-tokens 16 --blocks 64").engine().unwrap());
    let blocks = event(&mut engine);
    let mut mischief = Mischief::new(0, 7);
    mischief.add(&fault("gap"));
    let first = mischief.blocks(1.0, blocks.clone(), &mut engine).unwrap();
    let second = mischief.blocks(2.0, Blocks { sequence: 2, ..blocks }, &mut engine).unwrap();
    assert_eq!((first.sequence, second.sequence, mischief.sequence(2)), (2, 3, 3));
}
