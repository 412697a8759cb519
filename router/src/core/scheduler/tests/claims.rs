//! What a worker says of its speed is held against what is seen of it: who lies gets no more than its share.

use super::*;

/// What workers really cost here.
const TRUE: StepCost =
    StepCost { fixed_ms: 20.0, prefill_ms: 0.2, context_ms: 0.0, row_ms: 1.0, kv_ms: 0.0 };

/// A worker at its work: the truth, and what it says instead.
struct Played {
    id: u32,
    step: u64,
    /// Requests with what is left of their prompts, and of their answers.
    requests: Vec<(u64, u32, u32)>,
    /// When the step that runs ends, and what it computes.
    ends_ms: f64,
    tokens: u32,
    says: fn(&mut Step),
    /// The router reads its frames at multiples of this, those of one time at once.
    read_ms: f64,
    /// Those on the way.
    sent: std::collections::VecDeque<Sent>,
}

/// A frame on its way to the router.
struct Sent {
    read_ms: f64,
    step: Step,
    given: Given,
    begun: Vec<RequestId>,
    ended: Vec<RequestId>,
}

/// One of these comes in so many ms.
const EVERY_MS: f64 = 60.0;

/// Lets requests come and workers answer them. How many each one got.
fn play(
    scheduler: &mut Scheduler,
    says: &[fn(&mut Step)],
    numbers: std::ops::Range<u64>,
) -> Vec<u32> {
    play_read_late(scheduler, says, numbers, 0.0)
}

/// The same while the router reads frames in bursts: so many ms pass between two of them.
fn play_read_late(
    scheduler: &mut Scheduler,
    says: &[fn(&mut Step)],
    numbers: std::ops::Range<u64>,
    read_ms: f64,
) -> Vec<u32> {
    let mut workers: Vec<Played> = (0_u32..)
        .zip(says)
        .map(|(id, says)| Played {
            id,
            step: 100 * numbers.start,
            requests: Vec::new(),
            ends_ms: f64::INFINITY,
            tokens: 0,
            says: *says,
            read_ms,
            sent: std::collections::VecDeque::new(),
        })
        .collect();
    let mut got = vec![0; workers.len()];
    let mut asked = numbers.start;
    while asked < numbers.end {
        let arrives_ms = asked as f64 * EVERY_MS;
        let next = workers.iter_mut().min_by(|a, b| a.next_ms().total_cmp(&b.next_ms())).unwrap();
        if next.next_ms() <= arrives_ms {
            next.go_on(scheduler);
            continue;
        }
        asked += 1;
        let placement = scheduler.place(&want(asked, &keys(asked, 20, 0)), arrives_ms).unwrap();
        let worker = &mut workers[placement.worker.0 as usize];
        got[placement.worker.0 as usize] += 1;
        worker.requests.push((asked, 323, 10));
        if worker.ends_ms == f64::INFINITY {
            worker.begin_step(arrives_ms);
        }
    }
    got
}

impl Played {
    fn begin_step(&mut self, now_ms: f64) {
        if self.requests.is_empty() {
            self.ends_ms = f64::INFINITY;
            return;
        }
        let rows = self.requests.iter().filter(|(_, prompt, _)| *prompt == 0).count();
        self.tokens = self.requests.iter().map(|(_, prompt, _)| *prompt).sum::<u32>().min(500);
        let features = StepFeatures {
            prefill_tokens: self.tokens.into(),
            rows: rows as f64,
            ..StepFeatures::default()
        };
        self.ends_ms = now_ms + TRUE.step_ms(&features);
    }

    /// When something happens to it.
    fn next_ms(&self) -> f64 {
        self.sent.front().map_or(self.ends_ms, |sent| self.ends_ms.min(sent.read_ms))
    }

    fn go_on(&mut self, scheduler: &mut Scheduler) {
        if self.sent.front().is_some_and(|sent| sent.read_ms <= self.ends_ms) {
            let sent = self.sent.pop_front().unwrap();
            self.read(scheduler, &sent);
        } else {
            self.end_step(scheduler);
        }
    }

    fn end_step(&mut self, scheduler: &mut Scheduler) {
        let now_ms = self.ends_ms;
        self.step += 1;
        let (mut left, mut begun, mut given) = (self.tokens, Vec::new(), Given::default());
        for (request, prompt, answer) in &mut self.requests {
            if *prompt == 0 {
                *answer -= 1;
                given.add(1);
                continue;
            }
            let done = left.min(*prompt);
            left -= done;
            *prompt -= done;
            if *prompt == 0 {
                begun.push(RequestId(*request));
            }
        }
        let rows = given.rows;
        let features = StepFeatures {
            prefill_tokens: self.tokens.into(),
            rows: rows.into(),
            ..StepFeatures::default()
        };
        let running = self.requests.iter().filter(|(_, _, answer)| *answer > 0).count();
        let load = Load { running: running as u32, ..Load::default() };
        let ms = TRUE.step_ms(&features);
        let mut step = Step { ms, decode_rows: rows, load, ..report(self.step, self.tokens, load) };
        step.ms = ms;
        (self.says)(&mut step);
        let is_over = |(_, _, answer): &(u64, u32, u32)| *answer == 0;
        let over = self.requests.extract_if(.., |request| is_over(request));
        let ended = over.map(|(request, _, _)| RequestId(request)).collect();
        self.begin_step(now_ms);
        if self.read_ms == 0.0 {
            self.read(scheduler, &Sent { read_ms: now_ms, step, given, begun, ended });
        } else {
            let read_ms = (now_ms / self.read_ms).ceil() * self.read_ms;
            self.sent.push_back(Sent { read_ms, step, given, begun, ended });
        }
    }

    fn read(&self, scheduler: &mut Scheduler, sent: &Sent) {
        let now_ms = sent.read_ms;
        let _ = scheduler.step(WorkerId(self.id), &sent.step, sent.given, now_ms);
        for request in &sent.begun {
            scheduler.begun(*request, 0, now_ms);
        }
        for request in &sent.ended {
            scheduler.end(*request, LegOutput { tokens: 11, complete: true }, now_ms);
        }
    }
}

fn fleet(workers: u32, prior: impl Fn(u32) -> Option<StepCost>) -> Scheduler {
    let mut scheduler = scheduler(0);
    (0..workers).for_each(|id| join_unknown(&mut scheduler, id, prior(id)));
    scheduler
}

fn doubt(scheduler: &Scheduler, id: u32) -> Option<Doubt> {
    scheduler.view(WorkerId(id)).unwrap().doubt
}

type Says = fn(&mut Step);

const TRUTH: Says = |_| {};

const NOTHING: StepCost =
    StepCost { fixed_ms: 0.001, prefill_ms: 0.0, context_ms: 0.0, row_ms: 0.0, kv_ms: 0.0 };

#[test]
fn workers_that_tell_the_truth_are_believed_and_share_the_work() {
    let mut scheduler = fleet(4, |_| None);
    let got = play(&mut scheduler, &[TRUTH; 4], 0..2_000);
    assert!((0..4).all(|id| doubt(&scheduler, id).is_none()));
    assert!(got.iter().all(|n| (350..650).contains(n)), "{got:?}");
    assert!(scheduler.take_doubts().is_empty());
}

#[test]
fn a_liar_gets_no_more_than_its_share_whatever_it_lies_about() {
    let lies: [(&str, Says); 7] = [
        ("a fiftieth of its time", |step| step.ms /= 50.0),
        ("no time at all", |step| step.ms = 0.0),
        ("half of it", |step| step.ms /= 2.0),
        ("more work than there was", |step| {
            step.prefill_tokens *= 1_000;
            step.decode_rows *= 1_000;
        }),
        ("no work, no time", |step| {
            (step.ms, step.prefill_tokens, step.decode_rows) = (0.0, 0, 0);
        }),
        ("drafts that never were", |step| (step.drafted, step.accepted) = (0, 4_000_000)),
        ("drafts that nobody got", |step| (step.drafted, step.accepted) = (u32::MAX, u32::MAX)),
    ];
    for (what, lie) in lies {
        for prior in [None, Some(NOTHING)] {
            let mut scheduler = fleet(4, |id| if id == 0 { prior } else { Some(TRUE) });
            let says = [lie, TRUTH, TRUTH, TRUTH];
            let found_out = play(&mut scheduler, &says, 0..400);
            let left: Vec<RequestId> = scheduler.legs.keys().copied().collect();
            for request in left {
                scheduler.end(request, LegOutput::default(), 400.0 * EVERY_MS);
            }
            let got = play(&mut scheduler, &says, 1_000..2_000);
            assert!(got[0] <= 300, "{what}, {prior:?}: {got:?}");
            assert!(found_out[0] < 300, "{what}, {prior:?}: {found_out:?} of 400");
            assert!((1..4).all(|id| doubt(&scheduler, id).is_none()), "{what}");
        }
    }
}

#[test]
fn a_liar_whose_frames_are_read_in_bursts_gets_no_more_than_its_share() {
    // a router on a busy machine, and a worker that holds frames back, look the same
    for read_ms in [150.0, 400.0, 1_000.0] {
        let mut scheduler = fleet(3, |id| (id == 0).then_some(NOTHING));
        let says: [Says; 3] = [|step| step.ms = 0.0, TRUTH, TRUTH];
        let found_out = play_read_late(&mut scheduler, &says, 0..1_000, read_ms);
        assert!(found_out[0] <= 450, "frames each {read_ms} ms: {found_out:?}");
        assert!(doubt(&scheduler, 0).is_some());
        let features = StepFeatures { rows: 4.0, ..StepFeatures::default() };
        let (learnt, really) = (cost(&scheduler, 0).step_ms(&features), TRUE.step_ms(&features));
        assert!(learnt > 0.4 * really, "{read_ms}: {learnt} for {really} ms");
    }
}

#[test]
fn a_worker_without_a_past_is_not_believed_to_be_far_faster_than_all_others_and_may_show_it() {
    let mut scheduler = fleet(2, |_| Some(TRUE));
    play(&mut scheduler, &[TRUTH; 2], 0..200);
    join_unknown(&mut scheduler, 2, Some(NOTHING));
    join_unknown(&mut scheduler, 3, Some(StepCost { fixed_ms: 15.0, ..TRUE }));
    assert!(cost(&scheduler, 2).fixed_ms > 10.0, "{:?}", cost(&scheduler, 2));
    assert_eq!(cost(&scheduler, 3).fixed_ms, 15.0, "that may be");
    // it really is ten times as fast as the others
    for number in 1..60 {
        let step = Step { ms: 0.1 * (20.0 + 0.2 * 400.0), ..report(number, 400, Load::default()) };
        let _ = scheduler.step(WorkerId(2), &step, Given::default(), 1e6);
    }
    let features = StepFeatures { prefill_tokens: 400.0, ..StepFeatures::default() };
    let learnt = cost(&scheduler, 2).step_ms(&features);
    assert!((9.0..11.0).contains(&learnt), "{learnt}");
    assert_eq!(doubt(&scheduler, 2), None);
}

#[test]
fn answers_that_yield_take_as_long_as_others_let_them_and_say_nothing_of_their_worker() {
    for yields in [false, true] {
        let mut scheduler = fleet(1, |_| Some(TRUE));
        for request in 1..200 {
            let at_ms = request as f64 * 100_000.0;
            let want = PlacementRequest { yields, ..want(request, &keys(request, 1, 0)) };
            scheduler.place(&want, at_ms).unwrap();
            scheduler.begun(RequestId(request), 0, at_ms + 90_000.0);
            let output = LegOutput { tokens: 10, complete: true };
            scheduler.end(RequestId(request), output, at_ms + 99_000.0);
        }
        let expected = (!yields).then_some(Doubt::Requests);
        assert_eq!(doubt(&scheduler, 0), expected);
    }
}

#[test]
fn who_is_told_of_a_doubt_is_told_once_and_of_its_end() {
    let mut scheduler = fleet(1, |_| Some(TRUE));
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    scheduler.begun(RequestId(1), 0, 1.0);
    let mut tell = |says: f64, numbers: std::ops::Range<u64>| {
        for number in numbers {
            let step = Step { decode_rows: 1, ms: says, ..report(number, 0, Load::default()) };
            let given = Given { rows: 1, tokens: 1 };
            let _ = scheduler.step(WorkerId(0), &step, given, 20.0 * number as f64);
        }
        scheduler.take_doubts()
    };
    assert_eq!(tell(0.1, 1..200), [(WorkerId(0), Some(Doubt::Steps))]);
    assert_eq!(tell(20.0, 200..800), [(WorkerId(0), None)]);
    assert_eq!(tell(20.0, 800..900), []);
    // steps while nothing of ours is there say nothing
    scheduler.end(RequestId(1), LegOutput::default(), 1e6);
    for number in 900..1_200 {
        let step = Step { decode_rows: 1, ms: 0.1, ..report(number, 0, Load::default()) };
        let _ = scheduler.step(WorkerId(0), &step, Given::default(), 20.0 * number as f64);
    }
    assert_eq!(scheduler.take_doubts(), []);
}

#[test]
fn time_before_the_first_step_and_steps_that_came_in_one_frame_are_no_lies() {
    let mut scheduler = fleet(2, |_| Some(TRUE));
    for id in [0, 1] {
        scheduler.set_open(WorkerId(id), id == 0);
    }
    let give = Given { rows: 1, tokens: 1 };
    let mut now_ms = 0.0;
    // nothing to do before each of them: what it waits for, or where it is, is not known
    for n in 1..200 {
        scheduler.place(&want(n, &keys(n, 4, 0)), now_ms).unwrap();
        scheduler.begun(RequestId(n), 0, now_ms);
        now_ms += 100.0;
        let step = Step { decode_rows: 1, ms: 20.0, ..report(n, 0, Load::default()) };
        let _ = scheduler.step(WorkerId(0), &step, give, now_ms);
        scheduler.end(RequestId(n), LegOutput::default(), now_ms);
        now_ms += 1_000.0;
    }
    assert_eq!(scheduler.take_doubts(), []);
    // three steps at a time
    scheduler.place(&want(1_000, &keys(1_000, 4, 0)), now_ms).unwrap();
    scheduler.begun(RequestId(1_000), 0, now_ms);
    for n in 100..300 {
        now_ms += 60.0;
        let step = Step { decode_rows: 1, ms: 20.0, ..report(3 * n, 0, Load::default()) };
        let _ = scheduler.step(WorkerId(0), &step, give, now_ms);
    }
    assert_eq!(scheduler.take_doubts(), []);
}

#[test]
fn what_a_worker_that_is_not_believed_takes_for_prompts_is_measured() {
    let mut scheduler = fleet(2, |id| if id == 0 { Some(NOTHING) } else { Some(TRUE) });
    play(&mut scheduler, &[|step: &mut Step| step.ms = 0.0, TRUTH], 0..2_000);
    assert!(doubt(&scheduler, 0).is_some());
    let prompt = StepFeatures { prefill_tokens: 323.0, ..StepFeatures::default() };
    let learnt = scheduler.view(WorkerId(0)).unwrap().cost.step_ms(&prompt);
    let really = TRUE.step_ms(&prompt);
    assert!((0.5 * really..2.0 * really).contains(&learnt), "{learnt} for {really} ms");
}

/// Frames of worker 0, which has one row, each 20 ms after the one before: how long it says that each step took, and the
/// tokens that each gave.
fn frames(scheduler: &mut Scheduler, says_ms: f64, tokens: u32, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let step = Step {
            decode_rows: 1,
            ms: says_ms,
            drafted: tokens,
            accepted: tokens - 1,
            ..report(number, 0, Load::default())
        };
        let given = Given { rows: 1, tokens };
        let _ = scheduler.step(WorkerId(0), &step, given, 20.0 * number as f64);
    }
}

/// The number of the first frame that is not believed any more.
fn until_doubted(scheduler: &mut Scheduler, from: u64) -> u64 {
    let told = (from..from + 200).find(|number| {
        frames(scheduler, 0.1, 3, *number..number + 1);
        doubt(scheduler, 0).is_some()
    });
    told.expect("a two hundredth of the time is too little")
}

fn cost(scheduler: &Scheduler, id: u32) -> StepCost {
    scheduler.view(WorkerId(id)).unwrap().cost
}

#[test]
fn what_was_learnt_on_the_word_of_a_worker_goes_with_the_belief_in_it() {
    let unknown = cost(&fleet(1, |_| None), 0);
    let mut scheduler = fleet(1, |_| Some(NOTHING));
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    scheduler.begun(RequestId(1), 0, 1.0);
    let first = until_doubted(&mut scheduler, 1);
    assert_eq!(cost(&scheduler, 0), unknown, "as of a worker that never said anything");
    let accepted = scheduler.view(WorkerId(0)).unwrap().accepted;
    assert!(accepted < 1.2, "drafts count from this frame on, not {accepted} tokens a row");
    // what was measured while it was not believed, too, where it lies a second time
    let honest = first + 1..first + 600;
    frames(&mut scheduler, 20.0, 1, honest.clone());
    assert_eq!(doubt(&scheduler, 0), None, "it is believed again");
    until_doubted(&mut scheduler, honest.end);
    assert_eq!(cost(&scheduler, 0), unknown);
}

#[test]
fn a_worker_that_is_not_believed_begins_with_what_is_known_of_others() {
    let mut scheduler = fleet(2, |_| Some(NOTHING));
    scheduler.set_open(WorkerId(1), false);
    for number in 1..100 {
        let tokens = 37 * u32::try_from(number).unwrap() % 500;
        let work = StepFeatures { prefill_tokens: tokens.into(), ..StepFeatures::default() };
        let step = Step { ms: TRUE.step_ms(&work), ..report(number, tokens, Load::default()) };
        let _ = scheduler.step(WorkerId(1), &step, Given::default(), 0.0);
    }
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    scheduler.begun(RequestId(1), 0, 1.0);
    until_doubted(&mut scheduler, 1);
    let peers = cost(&scheduler, 1);
    assert_eq!(cost(&scheduler, 0), peers);
    let mut guess = StepFit::guess(Some(peers));
    let prompt = StepFeatures { prefill_tokens: 100.0, ..StepFeatures::default() };
    for fit in [&mut guess, &mut scheduler.workers[0].fit] {
        fit.observe(&prompt, 300.0);
    }
    assert_eq!(cost(&scheduler, 0), guess.cost(), "as a guess that the first steps replace");
}

#[test]
fn a_worker_that_joins_can_say_too_much_of_its_prompts_alone_or_of_its_answers_alone() {
    for (said, taken) in [
        (StepCost { fixed_ms: 15.0, prefill_ms: 0.15, ..TRUE }, true),
        (StepCost { prefill_ms: 0.02, ..TRUE }, false),
        (StepCost { fixed_ms: 5.0, row_ms: 0.5, ..TRUE }, false),
    ] {
        let mut scheduler = fleet(2, |_| Some(TRUE));
        play(&mut scheduler, &[TRUTH; 2], 0..200);
        join_unknown(&mut scheduler, 2, Some(said));
        assert_eq!(cost(&scheduler, 2) == said, taken, "{said:?}");
    }
}

#[test]
fn what_was_measured_in_an_earlier_doubt_is_not_learnt_in_a_later_one() {
    let mut scheduler = fleet(1, |_| Some(NOTHING));
    scheduler.place(&want(1, &keys(1, 4, 0)), 0.0).unwrap();
    scheduler.begun(RequestId(1), 0, 1.0);
    scheduler.workers[0].measured.frame(9, 0.0, 1e4);
    until_doubted(&mut scheduler, 1);
    let mut measured = scheduler.workers[0].measured;
    assert_eq!(measured.frame(0, 0.0, 1e6), None, "one frame of 20 ms");
}
