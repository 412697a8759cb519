use std::sync::mpsc;

use super::*;
use crate::error::Causes;

/// Blocks the only thread of `pool` until the returned sender is dropped.
async fn block(
    pool: &Arc<TokenizePool>,
) -> (mpsc::Sender<()>, tokio::task::JoinHandle<Result<(), RouteError>>) {
    let (release, gate) = mpsc::channel::<()>();
    let (started, running) = oneshot::channel();
    let pool = Arc::clone(pool);
    let blocked = tokio::spawn(async move {
        pool.run(move || {
            started.send(()).unwrap();
            gate.recv().ok();
        })
        .await
    });
    running.await.unwrap();
    (release, blocked)
}

/// Polls `call` once, which queues its job.
async fn start<T>(call: &mut (impl Future<Output = T> + Unpin)) {
    tokio::select! {
        biased;
        _ = call => panic!("the pool should have been busy"),
        () = std::future::ready(()) => {}
    }
}

#[tokio::test]
async fn full_queue_is_overloaded_and_a_dropped_call_skips_its_job() {
    let pool = Arc::new(TokenizePool::new(1, 1).unwrap());
    let (release, blocked) = block(&pool).await;
    let (ran, did_run) = mpsc::channel();
    let mut waiting = Box::pin(pool.run(move || ran.send(()).unwrap()));
    start(&mut waiting).await;
    assert_eq!(pool.queued(), 1);
    assert!(matches!(pool.run(|| ()).await, Err(RouteError::Overloaded { .. })));
    drop(waiting);
    drop(release);
    blocked.await.unwrap().unwrap();
    while let Err(RouteError::Overloaded { .. }) = pool.run(|| ()).await {
        tokio::task::yield_now().await;
    }
    assert!(did_run.try_recv().is_err());
}

#[tokio::test]
async fn a_panic_is_an_internal_error_and_the_thread_lives_on() {
    let pool = TokenizePool::new(1, 4).unwrap();
    let error = pool.run(|| panic!("boom")).await.unwrap_err();
    assert_eq!(Causes(&error).to_string(), "internal error: the tokenizer failed: panicked: boom");
    assert_eq!(pool.run(|| 7).await.unwrap(), 7);
}

#[tokio::test]
async fn shutdown_drops_the_queue_and_joins() {
    let pool = Arc::new(TokenizePool::new(1, 4).unwrap());
    let (release, blocked) = block(&pool).await;
    let mut waiting = Box::pin(pool.run(|| ()));
    start(&mut waiting).await;
    let stop = {
        let pool = Arc::clone(&pool);
        tokio::task::spawn_blocking(move || pool.shutdown())
    };
    assert!(matches!(waiting.await, Err(RouteError::ShuttingDown)));
    drop(release);
    stop.await.unwrap();
    blocked.await.unwrap().unwrap();
    assert!(matches!(pool.run(|| ()).await, Err(RouteError::ShuttingDown)));
}

/// Work of many turns: the name is written down at each, and the first one waits at a gate.
struct Long {
    name: &'static str,
    turns: usize,
    log: mpsc::Sender<(&'static str, Lane)>,
    gate: Option<mpsc::Receiver<()>>,
    lane: Lane,
}

impl Turns for Long {
    type Output = ();

    fn turn(&mut self, lane: Lane) -> Turn<()> {
        self.log.send((self.name, lane)).unwrap();
        if let Some(gate) = self.gate.take() {
            gate.recv().ok();
        }
        self.turns -= 1;
        if self.turns == 0 {
            return Turn::Done(());
        }
        Turn::More { left: self.turns.saturating_mul(100), lane: self.lane }
    }
}

fn long(
    turns: usize,
    log: &mpsc::Sender<(&'static str, Lane)>,
    gate: Option<mpsc::Receiver<()>>,
) -> Long {
    Long { name: "long", turns, log: log.clone(), gate, lane: Lane::Quick }
}

/// Lets `call` run on until `pool` has `queued` jobs.
async fn until_queued(pool: &TokenizePool, queued: usize) {
    while pool.queued() != queued {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn short_work_goes_between_the_turns_of_long_work() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let (log, order) = mpsc::channel();
    let (release, gate) = mpsc::channel();
    let mut first = Box::pin(pool.run_turns(long(10, &log, Some(gate)), 1_000, Lane::Quick));
    start(&mut first).await;
    assert_eq!(order.recv().unwrap().0, "long");
    let short = log.clone();
    let mut short = Box::pin(pool.run(move || short.send(("short", Lane::Quick)).unwrap()));
    start(&mut short).await;
    until_queued(&pool, 1).await;
    release.send(()).unwrap();
    short.await.unwrap();
    first.await.unwrap();
    let order: Vec<&str> = order.try_iter().map(|(name, _)| name).collect();
    assert_eq!(order[0], "short", "{order:?}");
    assert_eq!(order.len(), 10);
}

#[tokio::test]
async fn long_work_that_is_almost_done_goes_before_shorter_work_that_is_not() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let (log, order) = mpsc::channel();
    let (release, gate) = mpsc::channel();
    let mut first = Box::pin(pool.run_turns(long(2, &log, Some(gate)), 1_000, Lane::Quick));
    start(&mut first).await;
    order.recv().unwrap();
    let short = Long { name: "short", ..long(1, &log, None) };
    let mut short = Box::pin(pool.run_turns(short, 500, Lane::Quick));
    start(&mut short).await;
    release.send(()).unwrap();
    short.await.unwrap();
    first.await.unwrap();
    let order: Vec<&str> = order.try_iter().map(|(name, _)| name).collect();
    assert_eq!(order, ["long", "short"], "100 of its bytes are left");
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn only_slow_turns_have_a_low_priority() {
    struct Nice;
    impl Turns for Nice {
        type Output = i32;
        fn turn(&mut self, _lane: Lane) -> Turn<i32> {
            Turn::Done(nice())
        }
    }
    fn nice() -> i32 {
        rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap()
    }
    let pool = TokenizePool::new(1, 4).unwrap();
    assert_eq!(pool.run_turns(Nice, 0, Lane::Quick).await.unwrap(), nice());
    assert_eq!(pool.run_turns(Nice, 0, Lane::Slow).await.unwrap(), (nice() + 10).min(19));
}

#[tokio::test]
async fn who_hangs_up_leaves_the_queue_and_the_thread() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let (log, order) = mpsc::channel();
    let (release, gate) = mpsc::channel();
    let mut running = Box::pin(pool.run_turns(long(usize::MAX, &log, Some(gate)), 9, Lane::Quick));
    start(&mut running).await;
    order.recv().unwrap();
    let mut waiting = Box::pin(pool.run_turns(long(usize::MAX, &log, None), 70, Lane::Quick));
    start(&mut waiting).await;
    assert_eq!((pool.queued(), pool.queued_bytes()), (1, 70));
    drop(waiting);
    assert_eq!((pool.queued(), pool.queued_bytes()), (0, 0));
    drop(running);
    release.send(()).unwrap();
    pool.run(|| ()).await.unwrap(); // the thread is free again
    assert_eq!(order.try_iter().count(), 0);
}

#[tokio::test]
async fn work_that_nobody_waits_for_has_no_further_turn() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let (log, order) = mpsc::channel();
    let (release, gate) = mpsc::channel();
    let mut running = Box::pin(pool.run_turns(long(usize::MAX, &log, Some(gate)), 9, Lane::Quick));
    start(&mut running).await;
    order.recv().unwrap();
    drop((running, log));
    release.send(()).unwrap();
    assert!(order.recv().is_err(), "it is dropped, and its end of the channel with it");
}

#[tokio::test]
async fn slow_turns_hold_up_only_their_like() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let (log, order) = mpsc::channel();
    let (release, gate) = mpsc::channel();
    let mut slow = Box::pin(pool.run_turns(long(3, &log, Some(gate)), 1_000, Lane::Slow));
    start(&mut slow).await;
    assert_eq!(order.recv().unwrap(), ("long", Lane::Slow));
    pool.run(|| ()).await.unwrap(); // while the slow lane is busy
    release.send(()).unwrap();
    slow.await.unwrap();
    let order: Vec<Lane> = order.try_iter().map(|(_, lane)| lane).collect();
    assert_eq!(order, [Lane::Quick, Lane::Quick]);
}

#[tokio::test]
async fn text_that_waits_is_bounded_in_bytes() {
    let pool =
        Arc::new(TokenizePool::with_bounds(1, QueueBounds { jobs: 64, bytes: 100 }).unwrap());
    let (release, blocked) = block(&pool).await;
    let (log, _order) = mpsc::channel();
    let mut big = Box::pin(pool.run_turns(long(1, &log, None), 5_000_000, Lane::Quick));
    start(&mut big).await; // alone, whatever its size
    match pool.run_turns(long(1, &log, None), 1, Lane::Slow).await {
        Err(RouteError::Overloaded { what, retry_after }) => {
            assert!(what.contains("bytes"), "{what}");
            assert!(retry_after > Duration::from_secs(4), "{retry_after:?}");
        }
        other => panic!("{other:?}"),
    }
    drop(release);
    blocked.await.unwrap().unwrap();
    big.await.unwrap();
}

#[tokio::test]
async fn a_minute_of_text_may_wait_where_nobody_says_otherwise() {
    let pool = Arc::new(TokenizePool::new(1, 64).unwrap());
    let (release, blocked) = block(&pool).await;
    let (log, _order) = mpsc::channel();
    let mut first = Box::pin(pool.run_turns(long(1, &log, None), 1, Lane::Quick));
    start(&mut first).await;
    let more = pool.run_turns(long(1, &log, None), 64 << 20, Lane::Quick);
    let more = tokio::select! {
        biased;
        more = more => more,
        () = std::future::ready(()) => panic!("it was taken"),
    };
    assert!(matches!(more, Err(RouteError::Overloaded { .. })), "a byte more");
    let mut rest = Box::pin(pool.run_turns(long(1, &log, None), (64 << 20) - 1, Lane::Quick));
    start(&mut rest).await;
    drop(release);
    blocked.await.unwrap().unwrap();
    first.await.unwrap();
    rest.await.unwrap();
}

#[tokio::test]
async fn two_threads_have_room_again_in_half_the_time_of_one() {
    let mut seconds = Vec::new();
    for threads in [1, 2] {
        let bounds = QueueBounds { jobs: 64, bytes: 100 };
        let pool = Arc::new(TokenizePool::with_bounds(threads, bounds).unwrap());
        let mut busy = Vec::new();
        for _ in 0..threads {
            busy.push(block(&pool).await);
        }
        let (log, _order) = mpsc::channel();
        let mut big = Box::pin(pool.run_turns(long(1, &log, None), 8 << 20, Lane::Quick));
        start(&mut big).await;
        match pool.run(|| ()).await {
            Err(RouteError::Overloaded { retry_after, .. }) => seconds.push(retry_after.as_secs()),
            other => panic!("{other:?}"),
        }
        for (release, blocked) in busy {
            drop(release);
            blocked.await.unwrap().unwrap();
        }
        big.await.unwrap();
    }
    assert_eq!(seconds, [1 + 8, 1 + 4]);
}

#[tokio::test]
async fn shutdown_ends_work_at_its_next_turn() {
    let pool = Arc::new(TokenizePool::new(1, 4).unwrap());
    let (log, order) = mpsc::channel();
    let (release, gate) = mpsc::channel();
    let mut endless = Box::pin(pool.run_turns(long(usize::MAX, &log, Some(gate)), 1, Lane::Quick));
    start(&mut endless).await;
    order.recv().unwrap();
    let stop = {
        let pool = Arc::clone(&pool);
        tokio::task::spawn_blocking(move || pool.shutdown())
    };
    while !matches!(pool.run(|| ()).await, Err(RouteError::ShuttingDown)) {}
    release.send(()).unwrap();
    stop.await.unwrap();
    assert!(matches!(endless.await, Err(RouteError::ShuttingDown)));
}

/// Work that says on which thread it was done.
struct Where(Option<usize>);

impl Turns for Where {
    type Output = std::thread::ThreadId;

    fn turn(&mut self, lane: Lane) -> Turn<Self::Output> {
        match self.0.take() {
            Some(left) if lane == Lane::Here => Turn::More { left, lane: Lane::Quick },
            _ => Turn::Done(std::thread::current().id()),
        }
    }
}

#[tokio::test]
async fn a_first_turn_may_be_done_by_the_thread_that_asks() {
    let pool = TokenizePool::new(1, 4).unwrap();
    let here = std::thread::current().id();
    assert!(matches!(pool.turn_here(&mut Where(None)), Ok(Turn::Done(thread)) if thread == here));
    let mut work = Where(Some(7));
    let Ok(Turn::More { left, lane }) = pool.turn_here(&mut work) else { panic!("it was done") };
    assert_ne!(pool.run_turns(work, left, lane).await.unwrap(), here);
    let mut broken = Once(Some(|| panic!("broken")));
    assert!(matches!(pool.turn_here::<Once<_>>(&mut broken), Err(RouteError::Internal { .. })));
    pool.shutdown();
    assert!(matches!(pool.turn_here(&mut Where(None)), Err(RouteError::ShuttingDown)));
}
