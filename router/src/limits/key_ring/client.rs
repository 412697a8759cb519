//! One key of a client: what it may, and what it has used.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use crate::config::{KeyTerms, KnownKey, Tenant};
use crate::error::RouteError;
use crate::limits::bucket::{Rate, TokenBucket};

/// A key, as its line is now.
pub struct ClientKey {
    tenant: Tenant,
    tenant_name: Option<Arc<str>>,
    terms: KeyTerms,
    used: Arc<Used>,
}

/// What a key has used; it stays when its line changes.
#[derive(Debug)]
pub(super) struct Used {
    since: Instant,
    buckets: Mutex<Buckets>,
    streams: AtomicU32,
    pub(super) requests: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) completion_tokens: AtomicU64,
    /// Requests that were refused for the rate of requests, for that of tokens, and for the answers at a time.
    pub(super) limited: [AtomicU64; 3],
}

#[derive(Debug, Default)]
struct Buckets {
    requests: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
}

/// The places of [`Used::limited`].
const REQUESTS: usize = 0;
const TOKENS: usize = 1;
const STREAMS: usize = 2;

/// How much of one rate is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLeft {
    /// A minute.
    pub limit: u32,
    /// Now.
    pub remaining: u32,
    /// Until all of it is there again.
    pub reset: Duration,
}

/// How much of each rate is left; `None` where there is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeyStanding {
    /// Of requests.
    pub requests: Option<RateLeft>,
    /// Of tokens.
    pub tokens: Option<RateLeft>,
}

impl ClientKey {
    /// `before`: the same key, as its line was.
    pub(super) fn of(key: &KnownKey, before: Option<&Self>) -> Self {
        let used = before.map_or_else(|| Arc::new(Used::new()), |before| Arc::clone(&before.used));
        Self {
            tenant: key.tenant,
            tenant_name: key.tenant_name.clone(),
            terms: key.terms.clone(),
            used,
        }
    }

    /// Whose it is.
    pub(crate) fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// What its line calls that tenant.
    pub(crate) fn tenant_name(&self) -> Option<Arc<str>> {
        self.tenant_name.clone()
    }

    pub(crate) fn terms(&self) -> &KeyTerms {
        &self.terms
    }

    pub(super) fn used(&self) -> &Used {
        &self.used
    }

    /// Answers that it has now.
    pub(super) fn streams(&self) -> u32 {
        self.used.streams.load(Relaxed)
    }

    /// Takes note of a request.
    ///
    /// # Errors
    /// `KeyLimit`: it has sent as many as it may, or owes tokens. Such a request counts for nothing.
    pub(crate) fn admit(&self) -> Result<(), RouteError> {
        let now = self.used.now_ms();
        let mut buckets = self.used.buckets();
        if let Some(rate) = rate(self.terms.tokens_per_minute) {
            let tokens = buckets.tokens.get_or_insert_with(|| TokenBucket::full(rate, now));
            if let Err(wait) = tokens.take(rate, 1, now) {
                return Err(self.limited(TOKENS, rate, wait));
            }
            tokens.give_back(rate, 1, now); // what it needs is known once it is tokenised
        }
        if let Some(rate) = rate(self.terms.requests_per_minute) {
            let requests = buckets.requests.get_or_insert_with(|| TokenBucket::full(rate, now));
            requests.take(rate, 1, now).map_err(|wait| self.limited(REQUESTS, rate, wait))?;
        }
        self.used.requests.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Takes the tokens of a prompt.
    ///
    /// # Errors
    /// `KeyLimit`: so many are not left. A prompt of more than a minute's worth needs a minute without any other.
    fn take_prompt(&self, tokens: u32) -> Result<(), RouteError> {
        if let Some(rate) = rate(self.terms.tokens_per_minute) {
            let now = self.used.now_ms();
            let mut buckets = self.used.buckets();
            let bucket = buckets.tokens.get_or_insert_with(|| TokenBucket::full(rate, now));
            bucket.take(rate, tokens, now).map_err(|wait| self.limited(TOKENS, rate, wait))?;
        }
        Ok(())
    }

    /// Of a prompt that no worker got.
    fn give_prompt_back(&self, tokens: u32) {
        if let Some(rate) = rate(self.terms.tokens_per_minute) {
            let now = self.used.now_ms();
            if let Some(bucket) = &mut self.used.buckets().tokens {
                bucket.give_back(rate, tokens, now);
            }
        }
    }

    /// Takes the tokens of an answer, which are there already: the key may owe them.
    fn charge_answer(&self, tokens: u32) {
        if let Some(rate) = rate(self.terms.tokens_per_minute) {
            let now = self.used.now_ms();
            let mut buckets = self.used.buckets();
            let bucket = buckets.tokens.get_or_insert_with(|| TokenBucket::full(rate, now));
            bucket.charge(rate, tokens, now);
        }
        self.used.completion_tokens.fetch_add(tokens.into(), Relaxed);
    }

    /// Takes note of `n` answers that begin.
    ///
    /// # Errors
    /// `KeyLimit`: so many at a time are too many.
    pub(crate) fn begin(self: &Arc<Self>, n: usize) -> Result<KeyPermit, RouteError> {
        let n = u32::try_from(n).unwrap_or(u32::MAX);
        let most = self.terms.streams.map_or(u32::MAX, NonZeroU32::get);
        let fits = |together: &u32| n == 0 || *together <= most;
        let more = |held: u32| held.checked_add(n).filter(fits);
        match self.used.streams.fetch_update(Relaxed, Relaxed, more) {
            Ok(_) => Ok(KeyPermit { key: Arc::clone(self), n, prompt: AtomicU32::new(0) }),
            Err(_) => {
                self.used.limited[STREAMS].fetch_add(1, Relaxed);
                let what = "answers at a time";
                Err(RouteError::KeyLimit { what, limit: most, retry_after: ANY_MOMENT })
            }
        }
    }

    fn limited(&self, which: usize, rate: Rate, wait_ms: u64) -> RouteError {
        self.used.limited[which].fetch_add(1, Relaxed);
        let what = if which == TOKENS { "tokens a minute" } else { "requests a minute" };
        RouteError::KeyLimit {
            what,
            limit: rate.0.get(),
            retry_after: Duration::from_millis(wait_ms),
        }
    }

    /// What is left to it.
    pub(crate) fn standing(&self) -> KeyStanding {
        let now = self.used.now_ms();
        let mut buckets = self.used.buckets();
        let left = |bucket: &mut Option<TokenBucket>, limit| {
            let rate = rate(limit)?;
            let bucket = bucket.get_or_insert_with(|| TokenBucket::full(rate, now));
            let reset = Duration::from_millis(bucket.full_in_ms(rate, now));
            Some(RateLeft { limit: rate.0.get(), remaining: bucket.remaining(rate, now), reset })
        };
        let requests = left(&mut buckets.requests, self.terms.requests_per_minute);
        let tokens = left(&mut buckets.tokens, self.terms.tokens_per_minute);
        KeyStanding { requests, tokens }
    }
}

/// When an answer ends, nobody knows: the shortest wait that a client can be told.
const ANY_MOMENT: Duration = Duration::from_secs(1);

fn rate(limit: Option<NonZeroU32>) -> Option<Rate> {
    limit.map(Rate)
}

impl fmt::Debug for ClientKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientKey({:?})", self.tenant)
    }
}

impl Used {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            buckets: Mutex::default(),
            streams: AtomicU32::new(0),
            requests: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            completion_tokens: AtomicU64::new(0),
            limited: Default::default(),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn buckets(&self) -> MutexGuard<'_, Buckets> {
        self.buckets.lock().expect("no holder panics")
    }
}

/// Answers of one key that run, until this drops.
#[derive(Debug)]
pub struct KeyPermit {
    key: Arc<ClientKey>,
    n: u32,
    /// Tokens that were taken for a prompt which no worker has yet.
    prompt: AtomicU32,
}

impl KeyPermit {
    /// Takes the tokens of a prompt, to be given back unless a worker gets it.
    ///
    /// # Errors
    /// `KeyLimit`: so many are not left.
    pub(crate) fn take_prompt(&self, tokens: usize) -> Result<(), RouteError> {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.key.take_prompt(tokens)?;
        self.prompt.store(tokens, Relaxed);
        Ok(())
    }

    /// A worker has it.
    pub(crate) fn served(&self) {
        let tokens = self.prompt.swap(0, Relaxed);
        self.key.used.prompt_tokens.fetch_add(tokens.into(), Relaxed);
    }

    /// Takes the tokens of what came of the answers.
    pub(crate) fn charge_answer(&self, tokens: u32) {
        self.key.charge_answer(tokens);
    }
}

impl Drop for KeyPermit {
    fn drop(&mut self) {
        self.key.used.streams.fetch_sub(self.n, Relaxed);
        let unserved = *self.prompt.get_mut();
        if unserved > 0 {
            self.key.give_prompt_back(unserved);
        }
    }
}
