//! Prompts on their way from worker to worker, and what is due for whom because of it: bytes that have arrived, leases
//! and patience that end. Pure; the fleet of a process shares one, and so does a simulated fleet.
//!
//! A worker's network card sends what was computed in the order in which it was computed, one chunk after the other, and
//! a chunk already while it is computed, layer group by layer group. So a prompt is there one latency after its last
//! layer group was sent, and the visible part of a transfer is that latency and group, unless the card is busy.

use std::collections::{BTreeMap, HashMap};

use headrace_router::core::frame::{RequestId, TransferFailure};

use super::engine::{Export, Progress, Pull};

/// Parts into which a chunk's layers are cut: those of DeepSeek-R1's 61, by four. The last one is sent when the chunk is
/// done.
const LAYER_GROUPS: f64 = 16.0;

/// What moving KV costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Terms {
    pub(crate) bytes_per_ms: f64,
    pub(crate) latency_ms: f64,
    pub(crate) block_bytes: u64,
    /// Wire tokens of a block.
    pub(crate) block_tokens: u32,
}

/// A leg on a worker, by the worker's number.
pub(crate) type Place = (usize, RequestId);

/// Something is due on a worker.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum News {
    /// A pull ended, well or not.
    Pulled(Pulled),
    /// Who pulled a prompt has all of it.
    Released(RequestId),
    /// Nobody pulled a prompt in time.
    LeaseEnds(RequestId),
    /// A prompt should have arrived by now.
    TooLate(RequestId),
}

/// How a pull ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pulled {
    pub(crate) request: RequestId,
    /// Number of the worker that it came from; `None` where that is none of this fleet.
    pub(crate) from: Option<usize>,
    pub(crate) blocks: u32,
    pub(crate) bytes: u64,
    /// Time on the wire: waiting for the prompt to be computed is left out.
    pub(crate) ms: f64,
    pub(crate) error: Option<TransferFailure>,
}

/// What is wrong with transfers from a worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ills {
    /// They take so many times longer.
    pub(crate) slow: f64,
    /// This one is lost on the way.
    pub(crate) fails: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Exchange {
    terms: Terms,
    /// Tells this fleet's tickets from others'.
    nonce: u64,
    exports: HashMap<Place, Offer>,
    /// Which export is pulled for a leg.
    pulls: HashMap<Place, Place>,
    cards: Vec<Card>,
    /// Since the last [`Exchange::take_told`].
    told: Vec<usize>,
    count: u64,
}

/// What one worker offers and pulls.
#[derive(Debug, Default)]
struct Card {
    /// When it has sent all that it is to send.
    free_ms: f64,
    /// It neither sends nor says anything.
    frozen: bool,
    /// By time, then in order; times are not negative, so that their bits sort like them.
    due: BTreeMap<(u64, u64), Due>,
}

#[derive(Debug)]
enum Due {
    News(News),
    /// All that this leg pulls has been sent.
    Sent(RequestId),
}

/// A prompt that may be pulled.
#[derive(Debug)]
struct Offer {
    prompt_tokens: u32,
    computed: u32,
    ills: Ills,
    pull: Option<Pulling>,
}

/// A pull in flight.
#[derive(Debug)]
struct Pulling {
    by: Place,
    /// Leading tokens that are there or need not be sent.
    sent: u32,
    began_ms: f64,
    blocks: u32,
    wire_ms: f64,
    /// It is known when all is there.
    is_whole: bool,
}

impl Exchange {
    /// Between so many workers. No two fleets share a `nonce`.
    pub(crate) fn new(terms: Terms, workers: usize, nonce: u64) -> Self {
        Self {
            terms,
            nonce,
            exports: HashMap::new(),
            pulls: HashMap::new(),
            cards: (0..workers).map(|_| Card::default()).collect(),
            told: Vec::new(),
            count: 0,
        }
    }

    // ---- the side that is pulled from ----

    /// A prompt may be pulled from now on; the ticket to do so.
    pub(crate) fn offer(&mut self, worker: usize, export: &Export, ills: Ills) -> Vec<u8> {
        let Export { request, prompt_tokens, computed, .. } = *export;
        let offer = Offer { prompt_tokens, computed, ills, pull: None };
        self.exports.insert((worker, request), offer);
        [self.nonce, worker as u64, request.0].iter().flat_map(|part| part.to_le_bytes()).collect()
    }

    /// A step that took `step_ms` ends on a worker, and so far is a prompt then.
    pub(crate) fn computed(
        &mut self,
        worker: usize,
        progress: &Progress,
        step_ms: f64,
        now_ms: f64,
    ) {
        let place = (worker, progress.request);
        if let Some(lease_ms) = progress.pinned_ms {
            let ends = News::LeaseEnds(progress.request);
            self.tell(worker, now_ms + f64::from(lease_ms), ends);
        }
        let Some(offer) = self.exports.get_mut(&place) else { return };
        offer.computed = progress.computed;
        self.send(place, now_ms - step_ms, now_ms);
    }

    /// A prompt cannot be pulled any more; who pulls it is told that.
    pub(crate) fn withdraw(&mut self, place: Place, why: TransferFailure, now_ms: f64) {
        let Some(pulling) = self.exports.remove(&place).and_then(|offer| offer.pull) else {
            return;
        };
        if self.pulls.remove(&pulling.by).is_some() {
            let (worker, request) = pulling.by;
            self.tell(worker, now_ms, News::Pulled(failed(request, Some(place.0), why)));
        }
    }

    // ---- the side that pulls ----

    /// Begins to pull a prompt; how that ends comes as news.
    pub(crate) fn pull(&mut self, worker: usize, pull: &Pull, now_ms: f64) {
        let by = (worker, pull.request);
        let place = self.read(&pull.ticket);
        let offer = place.and_then(|place| self.exports.get_mut(&place));
        let (Some(place), Some(offer)) = (place, offer) else {
            let lost = failed(pull.request, place.map(|(from, _)| from), TransferFailure::Lost);
            return self.tell(worker, now_ms + self.terms.latency_ms, News::Pulled(lost));
        };
        if offer.pull.is_some() || offer.prompt_tokens != pull.prompt_tokens {
            let refused = failed(pull.request, Some(place.0), TransferFailure::Refused);
            return self.tell(worker, now_ms + self.terms.latency_ms, News::Pulled(refused));
        }
        let block_tokens = self.terms.block_tokens;
        offer.pull = Some(Pulling {
            by,
            sent: pull.held,
            began_ms: now_ms,
            blocks: pull.prompt_tokens.div_ceil(block_tokens) - pull.held / block_tokens,
            wire_ms: 0.0,
            is_whole: false,
        });
        self.pulls.insert(by, place);
        self.send(place, now_ms, now_ms);
    }

    /// Stops pulling; how that ended, if it was in flight.
    pub(crate) fn abandon(&mut self, by: Place, why: TransferFailure) -> Option<Pulled> {
        let place = self.pulls.remove(&by)?;
        if let Some(offer) = self.exports.get_mut(&place) {
            offer.pull = None;
        }
        Some(failed(by.1, Some(place.0), why))
    }

    /// Tells a worker when a prompt should have arrived.
    pub(crate) fn expect_until(&mut self, by: Place, until_ms: f64) {
        self.tell(by.0, until_ms, News::TooLate(by.1));
    }

    // ---- both ----

    /// A worker's requests are all gone, and whatever was due for them.
    pub(crate) fn forget(&mut self, worker: usize, now_ms: f64) {
        let mut offered: Vec<_> =
            self.exports.keys().copied().filter(|place| place.0 == worker).collect();
        offered.sort_unstable();
        for place in offered {
            self.withdraw(place, TransferFailure::Lost, now_ms);
        }
        let mut pulled: Vec<_> = self.pulls.keys().copied().filter(|by| by.0 == worker).collect();
        pulled.sort_unstable();
        for by in pulled {
            self.abandon(by, TransferFailure::Cancelled);
        }
        self.cards[worker] = Card::default();
    }

    /// A frozen worker answers nobody: who has pulled all learns only afterwards that it was in time.
    pub(crate) fn freeze(&mut self, worker: usize, frozen: bool) {
        if std::mem::replace(&mut self.cards[worker].frozen, frozen) && !frozen {
            let pullers = self.pulls.iter().filter(|(_, place)| place.0 == worker);
            self.told.extend(pullers.map(|(by, _)| by.0));
            self.told.sort_unstable();
        }
    }

    /// When something is due on a worker.
    pub(crate) fn next_ms(&self, worker: usize) -> Option<f64> {
        let due = self.cards[worker].due.iter().find(|(_, due)| !self.is_held_up(worker, due));
        due.map(|((at, _), _)| f64::from_bits(*at))
    }

    /// What is due on a worker by now.
    pub(crate) fn take(&mut self, worker: usize, now_ms: f64) -> Vec<News> {
        let by_now = (now_ms.max(0.0).to_bits(), u64::MAX);
        let due = self.cards[worker].due.range(..=by_now);
        let due = due.filter(|(_, due)| !self.is_held_up(worker, due));
        let places: Vec<_> = due.map(|(place, _)| *place).collect();
        let mut news = Vec::new();
        for place in places {
            match self.cards[worker].due.remove(&place) {
                None => {}
                Some(Due::News(one)) => news.push(one),
                Some(Due::Sent(request)) => {
                    news.extend(self.arrived((worker, request), now_ms).map(News::Pulled));
                }
            }
        }
        news
    }

    /// Workers that were told something since the last call: [`Exchange::next_ms`] may be earlier for them.
    pub(crate) fn take_told(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.told)
    }

    /// Exports and pulls that are there.
    #[cfg(test)]
    pub(crate) fn len(&self) -> (usize, usize) {
        (self.exports.len(), self.pulls.len())
    }

    fn read(&self, ticket: &[u8]) -> Option<Place> {
        let number = |at| Some(u64::from_le_bytes(ticket.get(at..at + 8)?.try_into().ok()?));
        let (nonce, worker, request) = (number(0)?, number(8)?, number(16)?);
        let worker = usize::try_from(worker).ok()?;
        let ours = ticket.len() == 24 && nonce == self.nonce && worker < self.cards.len();
        ours.then_some((worker, RequestId(request)))
    }

    /// Sends what was computed from `since_ms` on and is asked for.
    fn send(&mut self, place: Place, since_ms: f64, now_ms: f64) {
        let Some(offer) = self.exports.get_mut(&place) else { return };
        let Some(pull) = offer.pull.as_mut().filter(|pull| !pull.is_whole) else { return };
        let Terms { bytes_per_ms, latency_ms, block_bytes, block_tokens } = self.terms;
        let blocks = |tokens: u32| match tokens {
            all if all == offer.prompt_tokens => all.div_ceil(block_tokens),
            part => part / block_tokens,
        };
        let tokens = offer.computed.max(pull.sent);
        let new = u64::from(blocks(tokens) - blocks(pull.sent).min(blocks(tokens)));
        let wire_ms = (new * block_bytes) as f64 / bytes_per_ms * offer.ills.slow;
        let card = &mut self.cards[place.0];
        let starts_ms = card.free_ms.max(since_ms).max(pull.began_ms);
        // what was computed before the pull began is there whole
        let last_ms = if since_ms < now_ms { wire_ms / LAYER_GROUPS } else { wire_ms };
        let ends_ms = (starts_ms + wire_ms).max(now_ms + last_ms);
        if new > 0 {
            card.free_ms = ends_ms;
        }
        pull.sent = tokens;
        pull.wire_ms += wire_ms;
        if offer.computed < offer.prompt_tokens {
            return; // also where nothing has to be sent: the pin must last until the first token
        }
        pull.is_whole = true;
        pull.wire_ms += latency_ms;
        let (worker, request) = pull.by;
        self.due(worker, ends_ms.max(now_ms) + latency_ms, Due::Sent(request));
    }

    /// A leg that was not abandoned has its prompt, if it was not lost on the way: that is said to where it came from.
    fn arrived(&mut self, by: Place, now_ms: f64) -> Option<Pulled> {
        let place = self.pulls.remove(&by)?;
        let offer = self.exports.get_mut(&place).expect("its pull would have been told");
        let pull = offer.pull.take().expect("it is pulled");
        if offer.ills.fails {
            return Some(failed(by.1, Some(place.0), TransferFailure::Lost));
        }
        self.exports.remove(&place);
        self.tell(place.0, now_ms, News::Released(place.1));
        Some(Pulled {
            request: by.1,
            from: Some(place.0),
            blocks: pull.blocks,
            bytes: u64::from(pull.blocks) * self.terms.block_bytes,
            ms: pull.wire_ms,
            error: None,
        })
    }

    /// It needs the word of a worker that is frozen.
    fn is_held_up(&self, worker: usize, due: &Due) -> bool {
        let Due::Sent(request) = due else { return false };
        self.pulls.get(&(worker, *request)).is_some_and(|place| self.cards[place.0].frozen)
    }

    fn tell(&mut self, worker: usize, at_ms: f64, news: News) {
        self.due(worker, at_ms, Due::News(news));
    }

    fn due(&mut self, worker: usize, at_ms: f64, due: Due) {
        self.count += 1;
        self.cards[worker].due.insert((at_ms.max(0.0).to_bits(), self.count), due);
        self.told.push(worker);
    }
}

fn failed(request: RequestId, from: Option<usize>, error: TransferFailure) -> Pulled {
    Pulled { request, from, blocks: 0, bytes: 0, ms: 0.0, error: Some(error) }
}
