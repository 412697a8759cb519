//! One request on two mock workers, frame by frame.

use headrace_router::core::frame::{
    Continue, FailureKind, Finish, Freed, KvFrom, KvReady, KvTransfer, Output, Role, Ticket,
    TransferBackend, TransferFailure, Transferred,
};
use headrace_router::core::secret::PullKey;

use super::*;

const PREFILL: RequestId = RequestId(100);
const DECODE: RequestId = RequestId(200);
const WHOLE: RequestId = RequestId(300);
const PULL_KEY: PullKey = PullKey([3; 32]);

/// A prefill and a decode worker, welcomed by hand.
struct Pair {
    prefill: ByHand,
    decode: ByHand,
    _running: Running,
    listener: TcpListener,
}

async fn pair(flags: &str) -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let running = fleet(&address, &format!("{FAST} --prefill 1 --decode 1 {flags}"));
    let first = ByHand::welcome(&listener, 7).await;
    let second = ByHand::welcome(&listener, 7).await;
    let (prefill, decode) =
        if first.hello.role == Role::Prefill { (first, second) } else { (second, first) };
    Pair { prefill, decode, _running: running, listener }
}

fn submit(request: RequestId, max_tokens: u32) -> Submit {
    Submit {
        request,
        tokens: (0..100_u32).flat_map(|i| (700 + i).to_le_bytes()).collect(),
        sampling: Sampling { seed: 5, ..Sampling::default() },
        stop_ids: Vec::new(),
        max_tokens,
        deadline_ms: None,
        priority: 0,
        salt: Vec::new(),
        kv_from: None,
        resume: None,
        kv_transfer: None,
        pooling: None,
        request_id: "".into(),
        trace: None,
    }
}

fn kv_from(timeout_ms: u32) -> Option<KvFrom> {
    let transfer = vec!["mock:1".into()];
    Some(KvFrom { worker: "w0".into(), transfer, timeout_ms, pull_key: PULL_KEY })
}

impl ByHand {
    /// Reads up to the frame that `found` picks.
    async fn find<T>(&mut self, mut found: impl FnMut(Frame) -> Option<T>) -> T {
        loop {
            if let Some(found) = found(self.next().await) {
                return found;
            }
        }
    }

    async fn kv_ready(&mut self) -> KvReady {
        self.find(|frame| if let Frame::KvReady(ready) = frame { Some(ready) } else { None }).await
    }

    async fn freed(&mut self) -> Freed {
        self.find(|frame| if let Frame::Freed(freed) = frame { Some(freed) } else { None }).await
    }

    async fn transferred(&mut self) -> Transferred {
        self.find(|f| if let Frame::Transferred(moved) = f { Some(moved) } else { None }).await
    }

    /// The next output.
    async fn output(&mut self) -> Output {
        let first =
            |frame| if let Frame::Step(mut step) = frame { step.outputs.pop() } else { None };
        self.find(first).await
    }

    /// All tokens up to the end.
    async fn rest(&mut self) -> Vec<u32> {
        let mut ids = Vec::new();
        loop {
            let output = self.output().await;
            ids.extend(output.ids);
            if output.finish.is_some() {
                return ids;
            }
        }
    }
}

impl Pair {
    /// Both legs; the ticket is passed on.
    async fn begin(&mut self, lease_ms: u32, timeout_ms: u32) {
        let kv_transfer = Some(KvTransfer { lease_ms, pull_key: PULL_KEY });
        self.prefill.send(Frame::Submit(Submit { kv_transfer, ..submit(PREFILL, 6) })).await;
        let leg = Submit { kv_from: kv_from(timeout_ms), ..submit(DECODE, 6) };
        self.decode.send(Frame::Submit(leg)).await;
        let ready = self.prefill.kv_ready().await;
        assert_eq!((ready.request, ready.lease_ms), (PREFILL, lease_ms));
        self.decode.send(Frame::Ticket(Ticket { request: DECODE, ticket: ready.ticket })).await;
    }

    async fn go_on(&mut self, ids: &[u32]) {
        let generated = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.decode.send(Frame::Continue(Continue { request: DECODE, generated })).await;
    }

    /// What one worker answers that does it all.
    async fn whole(&mut self) -> Vec<u32> {
        self.decode.send(Frame::Submit(submit(WHOLE, 6))).await;
        self.decode.rest().await
    }
}

#[tokio::test]
async fn a_split_answer_is_the_whole_one_and_both_sides_are_freed() {
    let mut pair = pair("").await;
    assert_eq!(pair.decode.hello.role, Role::Decode);
    assert_eq!(pair.prefill.hello.kv_block_bytes, 16 * 576 * 61);
    pair.begin(10_000, 10_000).await;
    let first = pair.prefill.output().await;
    assert_eq!((first.request, first.ids.len(), first.finish), (PREFILL, 1, None));
    assert_eq!(first.cached_tokens, Some(0));
    pair.go_on(&first.ids).await;
    let moved = pair.decode.transferred().await;
    assert_eq!((moved.request, &*moved.worker), (DECODE, "w0"));
    assert_eq!(moved.backend, Some(TransferBackend::Mock));
    assert_eq!((moved.blocks, moved.bytes, moved.error), (7, 7 * 16 * 576 * 61, None));
    let rest = pair.decode.rest().await;
    assert_eq!(pair.prefill.freed().await, Freed { request: PREFILL, blocks: 7 });
    assert_eq!([first.ids, rest].concat(), pair.whole().await);
}

#[tokio::test]
async fn an_answer_of_one_token_ends_where_it_began() {
    let mut pair = pair("").await;
    let kv_transfer = Some(KvTransfer { lease_ms: 10_000, pull_key: PULL_KEY });
    pair.prefill.send(Frame::Submit(Submit { kv_transfer, ..submit(PREFILL, 1) })).await;
    assert_eq!(pair.prefill.output().await.finish, Some(Finish::Length));
    assert_eq!(pair.prefill.freed().await.request, PREFILL);
}

#[tokio::test]
async fn a_cancel_is_acknowledged_on_both_sides_at_any_point() {
    let mut pair = pair("--kv-latency-ms 60000").await;
    pair.begin(60_000, 60_000).await;
    let first = pair.prefill.output().await;
    pair.go_on(&first.ids).await;
    pair.decode.send(Frame::Cancel(Cancel { request: DECODE })).await;
    assert_eq!(pair.decode.transferred().await.error, Some(TransferFailure::Cancelled));
    assert_eq!(pair.decode.freed().await, Freed { request: DECODE, blocks: 7 });
    pair.prefill.send(Frame::Cancel(Cancel { request: PREFILL })).await;
    assert_eq!(pair.prefill.freed().await, Freed { request: PREFILL, blocks: 7 });
}

#[tokio::test]
async fn a_lease_that_ends_frees_and_the_prompt_is_computed_again() {
    let mut pair = pair("--kv-latency-ms 60000").await;
    pair.begin(20, 60_000).await;
    let first = pair.prefill.output().await;
    pair.go_on(&first.ids).await;
    assert_eq!(pair.prefill.freed().await.blocks, 7);
    assert_eq!(pair.decode.transferred().await.error, Some(TransferFailure::Expired));
    let rest = pair.decode.rest().await;
    assert_eq!([first.ids, rest].concat(), pair.whole().await);
}

#[tokio::test]
async fn what_is_late_or_lost_is_computed_again() {
    for (flags, timeout_ms, error) in [
        ("--kv-latency-ms 60000", 5, TransferFailure::Timeout),
        ("--fault w0:fail-transfer=1", 60_000, TransferFailure::Lost),
    ] {
        let mut pair = pair(flags).await;
        pair.begin(60_000, timeout_ms).await;
        let first = pair.prefill.output().await;
        pair.go_on(&first.ids).await;
        assert_eq!(pair.decode.transferred().await.error, Some(error));
        let rest = pair.decode.rest().await;
        assert_eq!([first.ids, rest].concat(), pair.whole().await);
    }
}

#[tokio::test]
async fn a_prefill_worker_that_hangs_up_leaves_everything_to_the_other() {
    let mut pair = pair("--kv-latency-ms 60000").await;
    pair.begin(60_000, 60_000).await;
    drop(pair.prefill);
    assert_eq!(pair.decode.transferred().await.error, Some(TransferFailure::Lost));
    pair.prefill = ByHand::welcome(&pair.listener, 7).await;
    pair.go_on(&[]).await;
    let alone = pair.decode.rest().await;
    assert_eq!(alone, pair.whole().await);
}

#[tokio::test]
async fn resumed_legs_go_on_after_what_was_generated() {
    let mut pair = pair("").await;
    let whole = pair.whole().await;
    let generated: Vec<u8> = whole[..2].iter().flat_map(|id| id.to_le_bytes()).collect();
    let resume = Some(headrace_router::core::frame::Resume { generated, rng_counter: 2 });
    let kv_transfer = Some(KvTransfer { lease_ms: 10_000, pull_key: PULL_KEY });
    let leg = Submit { resume: resume.clone(), kv_transfer, ..submit(PREFILL, 6) };
    pair.prefill.send(Frame::Submit(leg)).await;
    let leg = Submit { resume, kv_from: kv_from(10_000), ..submit(DECODE, 6) };
    pair.decode.send(Frame::Submit(leg)).await;
    let ready = pair.prefill.kv_ready().await;
    pair.decode.send(Frame::Ticket(Ticket { request: DECODE, ticket: ready.ticket })).await;
    let third = pair.prefill.output().await.ids;
    pair.go_on(&third).await;
    let rest = pair.decode.rest().await;
    assert_eq!([&whole[..2], &third, &rest].concat(), whole);
}

#[tokio::test]
async fn half_a_token_in_continue_closes_the_link() {
    let mut pair = pair("").await;
    pair.begin(60_000, 60_000).await;
    let go = Continue { request: DECODE, generated: vec![1, 2, 3] };
    pair.decode.send(Frame::Continue(go)).await;
    while let Ok(Some(_)) = timeout(IN_TIME, pair.decode.reader.next()).await.unwrap() {}
}

#[tokio::test]
async fn late_and_unknown_tickets_and_continues_are_ignored() {
    let mut pair = pair("").await;
    pair.decode.send(Frame::Ticket(Ticket { request: RequestId(9), ticket: vec![1] })).await;
    pair.decode.send(Frame::Continue(Continue { request: RequestId(9), generated: vec![] })).await;
    let leg = Submit {
        kv_transfer: Some(KvTransfer { lease_ms: 1, pull_key: PULL_KEY }),
        kv_from: kv_from(1),
        ..submit(DECODE, 6)
    };
    pair.decode.send(Frame::Submit(leg)).await;
    let failed = |frame| if let Frame::Failed(failed) = frame { Some(failed.kind) } else { None };
    assert_eq!(pair.decode.find(failed).await, FailureKind::Unsupported);
    assert_eq!(pair.whole().await.len(), 6);
}
