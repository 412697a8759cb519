//! Who goes in, and in which order.

use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::task::Wake;

use super::super::socket::pair;
use super::*;

const BURST: usize = 100;
const POLLS: usize = 3;

/// What the tasks of a test have done.
#[derive(Default)]
struct Done {
    polls: AtomicUsize,
    order: Mutex<Vec<usize>>,
}

fn burst(gate: &Arc<Gate>, done: &Arc<Done>) {
    for number in 0..BURST {
        let (gate, done) = (Arc::clone(gate), Arc::clone(done));
        tokio::spawn(async move {
            let work = async {
                for _ in 0..POLLS {
                    done.polls.fetch_add(1, Relaxed);
                    end_of_queue().await;
                }
                done.order.lock().unwrap().push(number);
            };
            gate.pass(&InHand::default(), work).await;
        });
    }
}

/// Polls of the burst between two of a stream, at most.
async fn most_between(gate: Arc<Gate>, done: Arc<Done>) -> usize {
    let in_hand = InHand::default();
    let _stream = in_hand.stream();
    let mut most = 0;
    let write = async {
        while done.order.lock().unwrap().len() < BURST {
            let before = done.polls.load(Relaxed);
            end_of_queue().await;
            most = most.max(done.polls.load(Relaxed) - before);
        }
    };
    gate.pass(&in_hand, write).await;
    most
}

fn poll(task: &mut (impl Future + Unpin)) -> bool {
    pin!(task).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

fn is_at_rest(gate: &Gate) -> bool {
    let turns = gate.rounds.turns();
    turns.outside.is_empty() && gate.rounds.outside.load(Relaxed) == 0
}

#[tokio::test]
async fn a_burst_stands_beside_a_stream_and_keeps_its_order() {
    let (gate, done) = (Arc::new(Gate::begin(2, true)), Arc::default());
    burst(&gate, &done);
    let stream = tokio::spawn(most_between(Arc::clone(&gate), Arc::clone(&done)));
    let most = stream.await.unwrap();
    assert!((1..=3).contains(&most), "{most} polls between two of the stream");
    assert_eq!(*done.order.lock().unwrap(), (0..BURST).collect::<Vec<_>>());
    assert!(is_at_rest(&gate));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_several_threads_everybody_comes_in() {
    let places = 4 * PLACES_PER_THREAD;
    let (gate, done) = (Arc::new(Gate::begin(places, true)), Arc::default());
    burst(&gate, &done);
    burst(&gate, &done);
    tokio::spawn(most_between(Arc::clone(&gate), Arc::clone(&done))).await.unwrap();
    while done.order.lock().unwrap().len() < 2 * BURST {
        end_of_queue().await;
    }
    assert_eq!(done.polls.load(Relaxed), 2 * BURST * POLLS);
}

#[tokio::test]
async fn the_more_streams_go_by_the_more_are_let_in() {
    let gate = Gate::begin(1, true);
    let none = InHand::default();
    let mut waits: Vec<_> = (0..20).map(|_| Box::pin(gate.pass(&none, async {}))).collect();
    waits.retain_mut(|task| !poll(task));
    assert_eq!(waits.len(), 19, "there is one place");
    for (streams, let_in) in [(0, 1), (POLLS_PER_PLACE - 1, 1), (5 * POLLS_PER_PLACE, 6)] {
        (0..streams).for_each(|_| gate.rounds.stream_goes());
        assert!(gate.rounds.begin());
        let before = waits.len();
        waits.retain_mut(|task| !poll(task));
        assert_eq!(before - waits.len(), let_in, "beside {streams} polls of streams");
    }
}

#[tokio::test]
async fn who_goes_away_while_it_waits_or_when_it_was_called_leaves_nothing_behind() {
    let gate = Gate::begin(1, true);
    let none = InHand::default();
    let mut waits: Vec<_> = (0..5).map(|_| Box::pin(gate.pass(&none, async {}))).collect();
    assert!(poll(&mut waits.remove(0)) && waits.iter_mut().all(|task| !poll(task)));
    drop(waits.remove(1)); // it waits
    assert_eq!(gate.rounds.outside.load(Relaxed), 3);
    assert!(gate.rounds.begin());
    drop(waits.remove(0)); // it was called
    assert!(!poll(&mut waits[0]), "its place is gone with this round");
    assert!(gate.rounds.begin());
    assert!(poll(&mut waits.remove(0)));
    assert!(gate.rounds.begin() && poll(&mut waits.remove(0)));
    assert!(is_at_rest(&gate) && !gate.rounds.begin());
}

#[tokio::test]
async fn a_task_that_has_begun_a_stream_needs_no_place() {
    let gate = Gate::begin(1, true);
    let in_hand = InHand::default();
    let mut task = Box::pin(gate.pass(&in_hand, async {
        let running = in_hand.stream();
        end_of_queue().await;
        drop(running);
        end_of_queue().await;
    }));
    assert!(!poll(&mut task), "it has begun");
    assert!(!poll(&mut task), "it has ended it, though the place is taken");
    assert!(!poll(&mut task), "and waits");
    assert!(gate.rounds.begin() && poll(&mut task));
    assert!(!in_hand.any_stream());
}

/// A task, and whether it was called since it was last polled.
struct Polled<F> {
    task: Pin<Box<F>>,
    called: Arc<Called>,
}

#[derive(Default)]
struct Called(AtomicBool);

impl Wake for Called {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

impl<F: Future> Polled<F> {
    fn new(task: F) -> Self {
        Self { task: Box::pin(task), called: Arc::default() }
    }

    fn is_over(&mut self) -> bool {
        let waker = Waker::from(Arc::clone(&self.called));
        let is_over = self.task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        self.called.0.store(false, Relaxed); // of its own accord, perhaps
        is_over
    }

    /// Lets the next one in, which has to be this one; whether it is over then.
    fn goes_next(&mut self, gate: &Gate) -> bool {
        assert!(gate.rounds.begin());
        assert!(self.called.0.load(Relaxed), "another one was called");
        self.is_over()
    }
}

/// Three who come once, while the only place is taken.
fn three_others<'a>(
    gate: &'a Gate,
    none: &'a InHand,
) -> Vec<Polled<impl Future<Output = ()> + use<'a>>> {
    let mut others: Vec<_> = (0..3).map(|_| Polled::new(gate.pass(none, async {}))).collect();
    assert!(others.iter_mut().all(|other| !other.is_over()));
    others
}

#[tokio::test]
async fn a_request_that_was_in_goes_before_those_that_came_later_until_it_is_answered() {
    let gate = Gate::begin(1, true);
    let (none, in_hand) = (InHand::default(), InHand::default());
    let mut task = Polled::new(gate.pass(&in_hand, async {
        let request = in_hand.request();
        end_of_queue().await;
        drop(request);
        end_of_queue().await;
    }));
    assert!(!task.is_over(), "it has begun");
    let others = three_others(&gate, &none);
    assert!(!task.is_over(), "the place is taken");
    assert!(!task.goes_next(&gate), "it is answered");
    assert!(!task.is_over(), "and waits again, now behind the others");
    for mut other in others {
        assert!(other.goes_next(&gate));
    }
    assert!(task.goes_next(&gate));
    assert!(is_at_rest(&gate));
}

#[tokio::test]
async fn the_next_request_of_a_pipeline_does_not_go_in_by_the_place_of_the_one_before() {
    let gate = Gate::begin(1, true);
    let (none, in_hand) = (InHand::default(), InHand::default());
    let mut task = Polled::new(gate.pass(&in_hand, async {
        let first = in_hand.request();
        end_of_queue().await;
        drop(first);
        let second = in_hand.request();
        end_of_queue().await;
        drop(second);
    }));
    assert!(!task.is_over());
    let others = three_others(&gate, &none);
    assert!(!task.is_over(), "the place is taken");
    assert!(!task.goes_next(&gate), "the second one has begun");
    assert!(!task.is_over());
    for mut other in others {
        assert!(other.goes_next(&gate));
    }
    assert!(task.goes_next(&gate));
    assert!(is_at_rest(&gate));
}

#[tokio::test]
async fn who_has_no_request_yet_takes_a_new_place_each_time() {
    let gate = Gate::begin(1, true);
    let (none, in_hand) = (InHand::default(), InHand::default());
    let mut task = Polled::new(gate.pass(&in_hand, async {
        end_of_queue().await;
        end_of_queue().await;
    }));
    assert!(!task.is_over(), "a part of its head came");
    let others = three_others(&gate, &none);
    assert!(!task.is_over(), "it waits behind the others");
    for mut other in others {
        assert!(other.goes_next(&gate));
    }
    assert!(!task.goes_next(&gate));
    drop(task);
    assert!(is_at_rest(&gate));
}

#[tokio::test]
async fn who_comes_again_and_again_goes_behind_those_that_came_meanwhile() {
    let gate = Gate::begin(1, true);
    let (none, in_hand) = (InHand::default(), InHand::default());
    let mut task = Polled::new(gate.pass(&in_hand, async {
        let _request = in_hand.request();
        for _ in 0..10 {
            end_of_queue().await;
        }
    }));
    assert!(!task.is_over());
    let others = three_others(&gate, &none);
    for _ in 1..TIMES_IN {
        assert!(!task.is_over(), "it waits");
        assert!(!task.goes_next(&gate));
    }
    assert!(!task.is_over(), "it waits, now behind the others");
    for mut other in others {
        assert!(other.goes_next(&gate));
    }
    assert!(!task.goes_next(&gate));
    drop(task);
    assert!(is_at_rest(&gate));
}

#[tokio::test(start_paused = true)]
async fn those_who_ask_on_and_on_have_a_slot_each_100_us_and_none_early_by_more_than_a_timer_tells()
{
    let gates = Gates(vec![Gate::begin(1, true)]);
    let (socket, _client) = pair().await;
    let begin = Instant::now();
    let (mut early, mut late) = (Duration::ZERO, Duration::ZERO);
    for number in 0..200 {
        gates.slot(&socket).await;
        let (due, now) = (PACE * number, begin.elapsed());
        early = early.max(due.saturating_sub(now));
        late = late.max(now.saturating_sub(due));
    }
    assert!(early < EARLY && late <= Duration::from_millis(1), "{early:?}, {late:?}");
    assert!(early > EARLY / 2, "one timer serves several");
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_nobody_waits_for_any_more_is_had_by_others() {
    let gates = Gates(vec![Gate::begin(1, true)]);
    let ((one, _client), (other, _its_client)) = (pair().await, pair().await);
    for _ in 0..20 {
        gates.slot(&one).await;
    }
    let next = *gates.0[0].rounds.next_slot();
    let mut waits = Box::pin(gates.slot(&other));
    let mut behind = Box::pin(gates.slot(&other));
    assert!(!poll(&mut waits) && !poll(&mut behind));
    assert_eq!(*gates.0[0].rounds.next_slot(), next + PACE, "one at a time of a connection");
    drop(behind);
    drop(waits);
    assert_eq!(*gates.0[0].rounds.next_slot(), next);
}
