//! A client of etcd, with TLS and login: a lease and a key under it for routers, a prefix to read and watch for workers.
//!
//! The crate `etcd-client` needs `protoc` to be built, for an interface of which this takes a tenth; so the few messages
//! are written out in [`messages`], and `tonic` carries them.

mod error;
mod member;
pub mod messages;

use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use prost::Message;
use tokio::time::timeout;
use tonic::Streaming;

pub use self::error::EtcdError;
use self::error::MemberRefused;
use self::member::Member;
use self::messages::{
    DELETE, KeepAlive, KeptAlive, KeyValue, LeaseGrant, LeaseGranted, LeaseRevoke, Put, Range,
    Ranged, UnreadAnswer, WatchAnswer, WatchCreate, WatchQuestion,
};
use crate::config::EtcdAccess;

/// For one call at one member, the connection and the login included.
const CALL: Duration = Duration::from_secs(2);

/// A lease, by the number that etcd gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseId(i64);

/// A key and its value; no value where the key went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEntry {
    /// Key, with its prefix.
    pub key: Vec<u8>,
    /// Value that the key has now; `None` where the key went.
    pub value: Option<Vec<u8>>,
}

/// The members of one etcd. The one that answered last is asked first.
#[derive(Debug)]
pub struct Etcd {
    members: Vec<Member>,
    next: usize,
}

impl Etcd {
    /// `endpoints` are `HOST:PORT`, at least one.
    #[must_use]
    pub fn new(endpoints: Vec<String>, access: &EtcdAccess) -> Self {
        let member = |endpoint| Member::new(endpoint, access.clone());
        Self { members: endpoints.into_iter().map(member).collect(), next: 0 }
    }

    /// Begins a lease.
    ///
    /// # Errors
    /// No member did it.
    pub async fn grant(&mut self, ttl: Duration) -> Result<LeaseId, EtcdError> {
        let ttl_s = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
        let granted: LeaseGranted =
            self.ask("/etcdserverpb.Lease/LeaseGrant", LeaseGrant { ttl_s }).await?;
        if granted.id == 0 {
            return Err(EtcdError::answer("a lease without a number"));
        }
        Ok(LeaseId(granted.id))
    }

    /// Sets a key that goes with the lease.
    ///
    /// # Errors
    /// No member did it, or the lease is over.
    pub async fn put(&mut self, key: &str, value: &str, lease: LeaseId) -> Result<(), EtcdError> {
        let put = Put { key: key.into(), value: value.into(), lease: lease.0 };
        self.ask("/etcdserverpb.KV/Put", put).await.map(|UnreadAnswer {}| ())
    }

    /// False once the lease is over.
    ///
    /// # Errors
    /// No member answered.
    pub async fn keep_alive(&mut self, lease: LeaseId) -> Result<bool, EtcdError> {
        let question = KeepAlive { id: lease.0 };
        match self.ask("/etcdserverpb.Lease/LeaseKeepAlive", question).await {
            Ok(KeptAlive { ttl_s }) => Ok(ttl_s > 0),
            Err(EtcdError::LeaseLost) => Ok(false),
            Err(other) => Err(other),
        }
    }

    /// Ends a lease and removes its keys.
    ///
    /// # Errors
    /// No member did it.
    pub async fn revoke(&mut self, lease: LeaseId) -> Result<(), EtcdError> {
        match self.ask("/etcdserverpb.Lease/LeaseRevoke", LeaseRevoke { id: lease.0 }).await {
            Ok(UnreadAnswer {}) | Err(EtcdError::LeaseLost) => Ok(()),
            Err(other) => Err(other),
        }
    }

    /// At most `limit` entries whose keys begin with `prefix`, and the revision that they are of.
    ///
    /// # Errors
    /// No member answered.
    pub async fn read(
        &mut self,
        prefix: &[u8],
        limit: i64,
    ) -> Result<(Vec<EtcdEntry>, i64), EtcdError> {
        let range = Range { key: prefix.to_vec(), range_end: after(prefix), limit };
        let found: Ranged = self.ask("/etcdserverpb.KV/Range", range).await?;
        let header = found.header.ok_or_else(|| EtcdError::answer("no revision"))?;
        let entry = |kv: KeyValue| EtcdEntry { key: kv.key, value: Some(kv.value) };
        Ok((found.kvs.into_iter().map(entry).collect(), header.revision))
    }

    /// Follows the keys that begin with `prefix`, from `revision` on. The watch stands when this returns.
    ///
    /// # Errors
    /// No member answered, or the history from `revision` on is gone.
    pub async fn watch(&mut self, prefix: &[u8], revision: i64) -> Result<EtcdWatch, EtcdError> {
        let create = WatchCreate {
            key: prefix.to_vec(),
            range_end: after(prefix),
            start_revision: revision,
        };
        let question = WatchQuestion { create: Some(create) };
        let (first, answers) = self.open("/etcdserverpb.Watch/Watch", question, true).await?;
        let endpoint = self.members[self.next].endpoint().to_owned();
        let early = changed(&endpoint, first)?;
        Ok(EtcdWatch { endpoint, early, answers })
    }

    /// Asks the members one after the other until one answers.
    async fn ask<Q, A>(&mut self, path: &'static str, question: Q) -> Result<A, EtcdError>
    where
        Q: Message + Clone + Sync + 'static,
        A: Message + Default + 'static,
    {
        self.open(path, question, false).await.map(|(answer, _)| answer)
    }

    /// The first answer of the first member that has one, and what follows it as long as the call is open.
    async fn open<Q, A>(
        &mut self,
        path: &'static str,
        question: Q,
        stays_open: bool,
    ) -> Result<(A, Streaming<A>), EtcdError>
    where
        Q: Message + Clone + Sync + 'static,
        A: Message + Default + 'static,
    {
        let mut failed = None;
        for _ in 0..self.members.len() {
            let member = &mut self.members[self.next];
            let questions = || {
                let rest = if stays_open {
                    stream::pending().left_stream()
                } else {
                    stream::empty().right_stream()
                };
                stream::iter([question.clone()]).chain(rest)
            };
            let refused = match timeout(CALL, member.open(path, questions)).await {
                Ok(Ok(answered)) => return Ok(answered),
                Ok(Err(refused)) => refused,
                Err(late) => MemberRefused::unreachable(format!("no answer within {CALL:?}"), late),
            };
            let (error, elsewhere) = refused.at(member.endpoint());
            member.forget(); // what is half open or logged in no more is opened anew the next time
            if !elsewhere {
                return Err(error);
            }
            failed = Some(error);
            self.next = (self.next + 1) % self.members.len();
        }
        Err(failed.expect("config wants at least one endpoint"))
    }
}

/// Changes of a prefix, as they come. Dropping it ends the watch.
#[derive(Debug)]
pub struct EtcdWatch {
    endpoint: String,
    /// What came with the word that the watch stands.
    early: Vec<EtcdEntry>,
    answers: Streaming<WatchAnswer>,
}

impl EtcdWatch {
    /// The next changes, at least one; they may take for ever.
    ///
    /// # Errors
    /// The watch is over.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing.
    pub async fn next(&mut self) -> Result<Vec<EtcdEntry>, EtcdError> {
        loop {
            let changes = std::mem::take(&mut self.early);
            if !changes.is_empty() {
                return Ok(changes);
            }
            let answer = self.answers.message().await;
            let answer =
                answer.map_err(|status| MemberRefused::from(status).at(&self.endpoint).0)?;
            let answer = answer.ok_or_else(|| EtcdError::answer("the watch ended"))?;
            self.early = changed(&self.endpoint, answer)?;
        }
    }
}

fn changed(endpoint: &str, answer: WatchAnswer) -> Result<Vec<EtcdEntry>, EtcdError> {
    if answer.compact_revision != 0 {
        return Err(EtcdError::Compacted);
    }
    if answer.canceled {
        return Err(MemberRefused::cancelled(&answer.cancel_reason).at(endpoint).0);
    }
    let entry = |event: messages::Event| {
        let kv = event.kv.ok_or_else(|| EtcdError::answer("an event without a key"))?;
        Ok(EtcdEntry { key: kv.key, value: (event.kind != DELETE).then_some(kv.value) })
    };
    answer.events.into_iter().map(entry).collect()
}

/// The end of the range of all keys that begin with `prefix`, as etcd wants it.
fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if let Some(next) = last.checked_add(1) {
            end.push(next);
            return end;
        }
    }
    vec![0] // all keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_where_the_prefix_does() {
        for (prefix, end) in
            [(&b"head/"[..], &b"head0"[..]), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")]
        {
            assert_eq!(after(prefix), end);
        }
    }

    #[test]
    fn a_watch_says_what_came_what_went_and_why_it_ended() {
        let kv = |key: &str, value: &str| KeyValue { key: key.into(), value: value.into() };
        let event = |kind, kv| messages::Event { kind, kv };
        let events = vec![event(0, Some(kv("a", "1"))), event(DELETE, Some(kv("b", "")))];
        let entries = changed("e:1", WatchAnswer { events, ..WatchAnswer::default() }).unwrap();
        let values: Vec<_> = entries.into_iter().map(|entry| (entry.key, entry.value)).collect();
        assert_eq!(values, [(b"a".to_vec(), Some(b"1".to_vec())), (b"b".to_vec(), None)]);

        let compacted = WatchAnswer { compact_revision: 7, canceled: true, ..Default::default() };
        assert!(matches!(changed("e:1", compacted), Err(EtcdError::Compacted)));
        let denied = WatchAnswer {
            canceled: true,
            cancel_reason: "etcdserver: permission denied".into(),
            ..Default::default()
        };
        assert!(matches!(changed("e:1", denied), Err(EtcdError::Denied { .. })));
        let nameless = WatchAnswer { events: vec![event(0, None)], ..Default::default() };
        assert!(matches!(changed("e:1", nameless), Err(EtcdError::Answer { .. })));
    }
}
