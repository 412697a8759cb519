//! Whether what a worker says of its speed is true. Placements rest on it, and a worker that says too little draws all of them.
//!
//! Three things are known without its word: the time between its frames while it had work, which its steps have to account
//! for; the work that it was given, which is all that it can have done; and what became of requests whose times were predicted
//! from its steps. A worker whose word is far from any of them is taken at the router's own measure from then on.

/// Weight that older steps and requests keep when a new one is counted: some fifty of each.
const STEP_FADE: f64 = 0.98;
const REQUEST_FADE: f64 = 0.98;
/// So many count before anybody is judged.
const STEPS: f64 = 16.0;
const REQUESTS: f64 = 24.0;
/// Share of the time between frames that a worker's steps need not account for, and so many ms more. Guesses: what is lost
/// on the way and in the worker's own loop is far less, as its steps count from the end of the one before.
const MISSING: f64 = 0.25;
const MISSING_MS: f64 = 20.0;
/// No single step counts for more than so many times the mean one. A step that stood still, or frames that the router read
/// late, say little of the others.
const LONGEST: f64 = 8.0;
/// Times as long as predicted that requests may take, and so many ms more each. Predictions know nothing of what comes later:
/// at loads that a fleet cannot keep up with, those of true workers were simulated to be off by up to 7 times (Mooncake
/// conversation, 0.95) and 13 times (agentic, 1.5), and some by three times as much as others. So where others are there to
/// compare with, it is so many times what those are off by.
const TIMES: f64 = 8.0;
const TIMES_ALONE: f64 = 40.0;
const REQUEST_MS: f64 = 50.0;
/// Times as much work as it was given that it may say it did, as preemption makes it do some again; and so many tokens more.
const WORK_TIMES: f64 = 4.0;
const WORK_TOKENS: f64 = 8_192.0;
/// Work beyond which the older half is forgotten, in tokens.
const WORK_KEPT: f64 = 1e6;
/// Steps in a row whose sums agree before its word counts again.
const AGREED: u32 = 256;

/// Why a worker's word about its speed counts for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// Its steps do not account for the time between its frames.
    Steps,
    /// Its steps do more than there is to do. Its word does not count again on this link.
    Work,
    /// Its requests take many times as long as its steps let expect. Its word does not count again on this link.
    Requests,
}

impl Doubt {
    /// As a word, for metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steps => "step_times",
            Self::Work => "step_work",
            Self::Requests => "request_times",
        }
    }
}

/// What one worker said of its time, and what was seen of it. All sums fade.
#[derive(Debug, Clone, Default)]
pub(super) struct Claims {
    doubt: Option<Doubt>,
    said_ms: f64,
    seen_ms: f64,
    steps: f64,
    said_tokens: f64,
    given_tokens: f64,
    predicted_ms: f64,
    took_ms: f64,
    requests: f64,
    /// Steps in a row, while in doubt, after which what it said was what was seen.
    agreed: u32,
}

impl Claims {
    pub(super) fn doubt(&self) -> Option<Doubt> {
        self.doubt
    }

    /// It said that `steps` steps took `said_ms` each, and it had work all the `seen_ms` between the frames. True if its word
    /// begins or ends to count with this.
    pub(super) fn step(&mut self, said_ms: f64, steps: u64, seen_ms: f64) -> bool {
        let said_ms = if said_ms.is_finite() { said_ms.max(0.0) } else { 0.0 };
        let said_ms = said_ms * steps.min(64) as f64;
        let most = if self.steps < STEPS / 2.0 {
            f64::INFINITY
        } else {
            LONGEST * self.seen_ms / self.steps
        };
        self.said_ms = self.said_ms * STEP_FADE + said_ms.min(most);
        self.seen_ms = self.seen_ms * STEP_FADE + seen_ms.max(0.0).min(most);
        self.steps = self.steps * STEP_FADE + 1.0;
        let missing = self.seen_ms - self.said_ms > MISSING * self.seen_ms + MISSING_MS;
        match self.doubt {
            None if missing && self.steps > STEPS => {
                (self.doubt, self.agreed) = (Some(Doubt::Steps), 0);
                true
            }
            Some(Doubt::Steps) => {
                self.agreed = if missing { 0 } else { self.agreed + 1 };
                if self.agreed < AGREED {
                    return false;
                }
                self.doubt = None;
                true
            }
            None | Some(Doubt::Work | Doubt::Requests) => false,
        }
    }

    /// It was given work of so many tokens, and got them done.
    pub(super) fn gave(&mut self, tokens: f64) {
        self.given_tokens += tokens;
    }

    /// A step, it said, did so many tokens; `pending` are those that it may have begun. True if its word counts for nothing
    /// from now on.
    pub(super) fn work(&mut self, tokens: f64, pending: f64) -> bool {
        self.said_tokens += tokens;
        if self.given_tokens > WORK_KEPT {
            (self.said_tokens, self.given_tokens) =
                (self.said_tokens / 2.0, self.given_tokens / 2.0);
        }
        let absurd = self.said_tokens > WORK_TIMES * (self.given_tokens + pending) + WORK_TOKENS;
        absurd && self.doubt.is_none_or(|doubt| doubt == Doubt::Steps) && {
            self.doubt = Some(Doubt::Work);
            true
        }
    }

    /// A part of a request was predicted to take so long, and took so long; `usual` is what others of its model are off by, if
    /// that is known. True if its word counts for nothing from now on.
    pub(super) fn request(
        &mut self,
        predicted_ms: f64,
        took_ms: f64,
        usual: impl FnOnce() -> Option<f64>,
    ) -> bool {
        if !(predicted_ms.is_finite() && took_ms.is_finite()) {
            return false;
        }
        self.predicted_ms = self.predicted_ms * REQUEST_FADE + predicted_ms.max(0.0);
        self.took_ms = self.took_ms * REQUEST_FADE + took_ms.max(0.0);
        self.requests = self.requests * REQUEST_FADE + 1.0;
        let over =
            |times: f64| self.took_ms > times * self.predicted_ms + REQUEST_MS * self.requests;
        if self.requests < REQUESTS || !over(TIMES) {
            return false; // nearly always
        }
        let absurd = over(usual().map_or(TIMES_ALONE, |usual| TIMES * usual));
        absurd && self.doubt.is_none_or(|doubt| doubt == Doubt::Steps) && {
            self.doubt = Some(Doubt::Requests);
            true
        }
    }

    /// What its requests were predicted to take and took, lately, and how many they were; of one that is believed.
    pub(super) fn outcome(&self) -> Option<(f64, f64, f64)> {
        self.doubt.is_none().then_some((self.predicted_ms, self.took_ms, self.requests))
    }
}

/// How many times as long as predicted requests took on these workers; `None` if there were too few.
pub(super) fn usual<'a>(others: impl Iterator<Item = &'a Claims>) -> Option<f64> {
    let outcomes = others.filter_map(Claims::outcome);
    let sum = |a: (f64, f64, f64), b: (f64, f64, f64)| (a.0 + b.0, a.1 + b.1, a.2 + b.2);
    let (predicted_ms, took_ms, requests) = outcomes.reduce(sum)?;
    (requests >= REQUESTS).then(|| took_ms / predicted_ms.max(1e-3))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(steps: impl IntoIterator<Item = (f64, f64)>) -> Claims {
        let mut claims = Claims::default();
        for (said_ms, seen_ms) in steps {
            claims.step(said_ms, 1, seen_ms);
        }
        claims
    }

    #[test]
    fn who_says_less_than_is_seen_is_not_believed_and_who_says_as_much_is_again() {
        for (said, seen) in
            [(0.0, 10.0), (5.0, 10.0), (100.0, 200.0), (f64::NAN, 10.0), (-1.0, 5.0)]
        {
            let mut claims = after(std::iter::repeat_n((said, seen), 30));
            assert_eq!(claims.doubt(), Some(Doubt::Steps), "{said} of {seen} ms");
            let back = (1..1_000).find(|_| claims.step(seen, 1, seen));
            assert!(back.is_some_and(|n| n >= 256), "{back:?}");
            assert_eq!(claims.doubt(), None);
        }
        for (said, seen) in [(10.0, 10.0), (9.0, 10.0), (80.0, 100.0), (30.0, 10.0), (0.1, 0.3)] {
            let claims = after(std::iter::repeat_n((said, seen), 2_000));
            assert_eq!(claims.doubt(), None, "{said} of {seen} ms");
        }
    }

    #[test]
    fn frames_that_are_read_late_together_or_merged_and_a_step_that_stood_still_are_no_lies() {
        // a router that is held up again and again: nine frames at once, each tenth gap holds all the time
        let burst = |i: usize| (20.0, if i.is_multiple_of(10) { 200.0 } else { 0.0 });
        assert_eq!(after((0..1_000).map(burst)).doubt(), None);
        let stood_still = |i: usize| (20.0, if i == 500 { 8_000.0 } else { 20.0 });
        assert_eq!(after((0..1_000).map(stood_still)).doubt(), None);
        assert_eq!(after((0..501).map(stood_still)).doubt(), None, "not for a moment");
        let mut merged = Claims::default();
        for i in 0..1_000_u64 {
            merged.step(20.0, i % 4 + 1, 20.0 * (i % 4 + 1) as f64);
        }
        assert_eq!(merged.doubt(), None);
        // nor does one huge claim make up for the others
        for at in [10, 20] {
            let odd = |i: usize| if i == at { (1e12, 10.0) } else { (0.0, 10.0) };
            assert_eq!(after((0..100).map(odd)).doubt(), Some(Doubt::Steps));
        }
    }

    #[test]
    fn some_steps_have_to_be_seen_and_no_number_of_them_makes_up_for_their_time() {
        assert_eq!(after(std::iter::repeat_n((0.0, 1_000.0), 16)).doubt(), None, "too few");
        let mut skips = Claims::default();
        for _ in 0..100 {
            skips.step(0.01, 1_000_000, 10.0);
        }
        assert_eq!(skips.doubt(), Some(Doubt::Steps));
    }

    #[test]
    fn requests_that_take_many_times_as_long_as_predicted_end_the_belief_for_good() {
        let mut claims = Claims::default();
        for _ in 0..100 {
            assert!(!claims.request(100.0, 700.0, || Some(4.0)), "off, as predictions are");
            assert!(!claims.request(0.0, 40.0, || None), "too short to tell");
        }
        let mut short = Claims::default();
        assert!((0..1_000).all(|_| !short.request(0.0, 40.0, || Some(1.0))), "too short to tell");
        let mut alone = Claims::default();
        assert!((0..100).all(|_| !alone.request(100.0, 1_500.0, || None)), "an overload, perhaps");
        assert!((0..1_000).any(|_| alone.request(100.0, 6_000.0, || None)), "that is none");
        let mut claims = Claims::default();
        let odd = (0..100).find(|_| claims.request(100.0, 1_500.0, || Some(1.2)));
        assert!(odd.is_some(), "others are not off by as much");
        assert_eq!(usual([&claims].into_iter()), None, "and do not compare with it");
        let mut claims = Claims::default();
        let told = (1..100).find(|_| claims.request(0.0, 300.0, || None));
        assert!(told.is_some_and(|n| (24..=36).contains(&n)), "soon: {told:?}");
        assert!(!claims.request(0.0, 300.0, || None), "once");
        for _ in 0..1_000 {
            assert!(!claims.step(10.0, 1, 10.0));
        }
        assert_eq!(claims.doubt(), Some(Doubt::Requests));
        assert!(
            !claims.request(f64::NAN, 1.0, || None) && !claims.request(1.0, f64::INFINITY, || None)
        );
    }

    #[test]
    fn what_is_usual_takes_some_requests_to_know() {
        let mut claims = Claims::default();
        for _ in 0..20 {
            claims.request(100.0, 300.0, || None);
        }
        assert_eq!(usual([&claims].into_iter()), None);
        let together = usual([&claims, &claims].into_iter()).expect("forty are enough");
        assert!((together - 3.0).abs() < 1e-9, "{together}");
        assert_eq!(usual(std::iter::empty()), None);
    }

    #[test]
    fn what_a_worker_may_have_begun_is_no_lie_and_an_honest_past_covers_little() {
        let mut prompt = Claims::default();
        assert!(!prompt.work(20_000.0, 5_000.0), "of a prompt that is not done");
        assert!(prompt.work(20_000.0, 5_000.0), "twice as much of it");
        let mut old = Claims::default();
        for _ in 0..10_000 {
            old.gave(1_000.0);
            assert!(!old.work(1_000.0, 0.0));
        }
        let told = (0..10_000).find(|_| old.work(1_000.0, 0.0));
        assert!(told.is_some_and(|n| n < 5_000), "of ten million tokens one counts: {told:?}");
    }

    #[test]
    fn a_doubt_that_may_pass_gives_way_to_those_that_stay() {
        let doubted = || after(std::iter::repeat_n((0.0, 10.0), 30));
        let mut works = doubted();
        assert!(works.work(1e9, 0.0) && works.doubt() == Some(Doubt::Work));
        let mut asks = doubted();
        assert!((0..100).any(|_| asks.request(0.0, 1e6, || None)));
        assert_eq!(asks.doubt(), Some(Doubt::Requests));
    }

    #[test]
    fn who_says_that_it_did_far_more_than_it_was_given_is_not_believed() {
        let mut claims = Claims::default();
        let told = (0..1_000).find(|_| {
            claims.gave(10.0);
            claims.work(10_000.0, 300.0)
        });
        assert_eq!(told, Some(0), "more than there was at all");
        assert_eq!(claims.doubt(), Some(Doubt::Work));
        assert!(!claims.work(1e12, 0.0), "once");
        let mut honest = Claims::default();
        for _ in 0..100_000 {
            honest.gave(100.0);
            assert!(!honest.work(300.0, 0.0), "it had to do much of it again");
        }
    }

    /// It is told, sooner or later, of requests that all were predicted to take so long and took so long.
    fn told(predicted_ms: f64, took_ms: f64, usual: Option<f64>) -> bool {
        let mut claims = Claims::default();
        (0..2_000).any(|_| claims.request(predicted_ms, took_ms, || usual))
    }

    #[test]
    fn a_quarter_of_the_time_and_twenty_ms_of_fifty_steps_may_be_missing() {
        assert_eq!(after(std::iter::repeat_n((7.15, 10.0), 5_000)).doubt(), None);
        assert_eq!(after(std::iter::repeat_n((7.05, 10.0), 5_000)).doubt(), Some(Doubt::Steps));
    }

    #[test]
    fn a_step_that_stands_still_counts_as_eight_of_the_others() {
        let seen_with = |ms: f64| {
            let mut claims = after(std::iter::repeat_n((10.0, 10.0), 30));
            claims.step(10.0, 1, ms);
            claims.seen_ms
        };
        assert!((seen_with(1e6) - seen_with(80.0)).abs() < 1e-9);
        assert!((seen_with(80.0) - seen_with(79.0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn of_steps_in_one_frame_sixty_four_count() {
        let said_by = |steps: u64| {
            let mut claims = Claims::default();
            claims.step(1.0, steps, 1_000.0);
            claims.said_ms
        };
        assert_eq!([63, 64, 65].map(said_by), [63.0, 64.0, 64.0]);
    }

    #[test]
    fn only_256_steps_in_a_row_that_agree_bring_the_belief_back() {
        let doubted = || after(std::iter::repeat_n((0.0, 10.0), 30));
        let mut claims = doubted();
        while claims.agreed < 255 {
            assert!(!claims.step(10.0, 1, 10.0));
        }
        assert!(claims.step(10.0, 1, 10.0), "the last one");
        assert!((0..100).any(|_| claims.step(0.0, 1, 10.0)));
        assert_eq!(claims.agreed, 0, "those of the doubt before do not count");
        let mut claims = doubted();
        while claims.agreed < 100 {
            claims.step(10.0, 1, 10.0);
        }
        (0..40).for_each(|_| assert!(!claims.step(0.0, 1, 10.0)));
        assert_eq!(claims.agreed, 0, "they were not in a row");
    }

    #[test]
    fn four_times_the_work_that_was_given_and_8192_tokens_more_may_be_said() {
        for pending in [0.0, 500.0] {
            let mut claims = Claims::default();
            claims.gave(1_000.0);
            assert!(!claims.work(4.0 * (1_000.0 + pending) + 8_192.0, pending));
            assert!(claims.work(0.5, pending));
        }
        let after = |given: f64| {
            let mut claims = Claims::default();
            claims.gave(given);
            claims.work(10.0, 0.0);
            (claims.said_tokens, claims.given_tokens)
        };
        assert_eq!(after(1e6), (10.0, 1e6));
        assert_eq!(after(1e6 + 2.0), (5.0, 500_001.0), "half is forgotten");
    }

    #[test]
    fn requests_may_take_eight_times_as_long_as_is_usual_forty_times_alone_and_fifty_ms_more() {
        assert!(!told(0.0, 49.0, Some(1.0)) && told(0.0, 51.0, Some(1.0)));
        assert!(!told(100.0, 1_600.0, Some(2.0)) && told(100.0, 1_700.0, Some(2.0)));
        assert!(!told(100.0, 4_000.0, None) && told(100.0, 4_100.0, None));
        // who is usually early is held to the prediction all the same
        assert!(!told(100.0, 800.0, Some(0.1)) && told(100.0, 900.0, Some(0.1)));
    }

    #[test]
    fn what_came_of_requests_fades_and_what_is_no_time_is_none() {
        let mut claims = Claims::default();
        claims.request(1.0, f64::INFINITY, || None);
        assert_eq!(claims.outcome(), Some((0.0, 0.0, 0.0)));
        claims.request(-5.0, -3.0, || None);
        assert_eq!(claims.outcome(), Some((0.0, 0.0, 1.0)));
        claims.request(100.0, 300.0, || None);
        assert_eq!(claims.outcome(), Some((100.0, 300.0, 1.98)));
        assert_eq!(after(std::iter::repeat_n((0.0, 10.0), 30)).outcome(), None, "it is in doubt");
        let mut quick = Claims::default();
        (0..40).for_each(|_| assert!(!quick.request(0.01, 0.03, || None)));
        let usual = usual([&quick].into_iter()).expect("forty are enough");
        assert!((usual - 3.0).abs() < 1e-9, "{usual}");
    }

    proptest! {
        /// Whatever the frames' times, as long as the steps account for what was seen in all.
        #[test]
        fn a_true_worker_is_believed_however_its_frames_arrive(
            steps in prop::collection::vec((0.5_f64..50.0, 0_u8..4), 1..400)
        ) {
            let (mut claims, mut held_ms) = (Claims::default(), 0.0);
            for (ms, late) in steps {
                held_ms += ms;
                // read at once, or with one of the next
                let seen_ms = if late == 0 { 0.0 } else { std::mem::take(&mut held_ms) };
                claims.step(ms, 1, seen_ms);
                prop_assert_eq!(claims.doubt(), None);
            }
        }
    }
}
