//! Connections that have not introduced themselves: workers before their welcome, clients before their TLS is agreed on.
//! Whoever dials is let in here, for a short time, and makes room for others: the oldest that has sent nothing goes first. So
//! connections that say nothing, however many, keep nobody out. Who is known is not here any more.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::process::lock::Lock;

/// All of them in one lobby. Each costs a descriptor and a task; one that has sent nothing has no buffer yet. A guess: some
/// times what a fleet of a thousand workers that dial at once has in the middle of a handshake.
pub(crate) const MOST: usize = 1_024;
/// One peer has a quarter of the places, so that one cannot turn the others out.
const OF_A_PEER: usize = 4;
/// That somebody was turned out is logged so often at most.
const LOGGED: Duration = Duration::from_secs(10);

/// From where somebody dials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Origin {
    /// A machine, or a network of the kind that one customer gets: of IPv6 addresses the first half counts.
    Host(IpAddr),
    /// A user of this machine, through a Unix socket.
    User(Option<u32>),
}

impl Origin {
    pub(crate) fn of(address: IpAddr) -> Self {
        Self::Host(match address.to_canonical() {
            IpAddr::V6(address) => {
                let bits = address.to_bits() & !u128::from(u64::MAX);
                IpAddr::V6(std::net::Ipv6Addr::from_bits(bits))
            }
            address @ IpAddr::V4(_) => address,
        })
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Lobby {
    /// Who waits in it, for the log.
    of: &'static str,
    most: usize,
    most_of_a_peer: usize,
    guests: Lock<Guests>,
}

#[derive(Debug, Default)]
struct Guests {
    /// The oldest first.
    by_number: BTreeMap<u64, Guest>,
    of_peer: HashMap<Origin, usize>,
    next: u64,
    turned_out: u64,
    logged: Option<Instant>,
}

#[derive(Debug)]
struct Guest {
    peer: Origin,
    spoke: Arc<AtomicBool>,
    out: CancellationToken,
}

/// A connection's stay. It ends when this drops.
#[derive(Debug)]
pub(crate) struct Visit {
    lobby: Arc<Lobby>,
    number: u64,
    spoke: Arc<AtomicBool>,
    out: CancellationToken,
}

impl Lobby {
    /// For `most` connections at a time, 4 at least; `of` are those who dial.
    pub(crate) fn new(of: &'static str, most: usize) -> Arc<Self> {
        let most_of_a_peer = (most / OF_A_PEER).max(1);
        let guests = Lock::new("dials that are not answered yet", Guests::default());
        Arc::new(Self { of, most, most_of_a_peer, guests })
    }

    /// Lets a connection in, and turns another one out where there are too many.
    pub(crate) fn enter(self: &Arc<Self>, peer: Origin) -> Visit {
        let mut guests = self.guests.lock();
        if guests.of_peer.get(&peer).is_some_and(|n| *n >= self.most_of_a_peer) {
            guests.turn_out(peer, self.of);
        } else if guests.by_number.len() >= self.most {
            let crowd = guests.of_peer.iter().max_by_key(|(_, n)| **n).map(|(peer, _)| *peer);
            guests.turn_out(crowd.expect("there are many"), self.of);
        }
        guests.next += 1;
        let (number, out) = (guests.next, CancellationToken::new());
        let spoke = Arc::new(AtomicBool::new(false));
        let guest = Guest { peer, spoke: Arc::clone(&spoke), out: out.clone() };
        guests.by_number.insert(number, guest);
        *guests.of_peer.entry(peer).or_default() += 1;
        Visit { lobby: Arc::clone(self), number, spoke, out }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.guests.lock().by_number.len()
    }
}

impl Guests {
    /// The oldest of this peer that has sent nothing, or else the oldest.
    fn turn_out(&mut self, peer: Origin, of: &'static str) {
        let of_peer = || self.by_number.iter().filter(|(_, guest)| guest.peer == peer);
        let silent = of_peer().find(|(_, guest)| !guest.spoke.load(Relaxed));
        let silent = silent.or_else(|| of_peer().next());
        let Some(number) = silent.map(|(number, _)| *number) else { return };
        if let Some(guest) = self.remove(number) {
            guest.out.cancel();
        }
        self.turned_out += 1;
        let now = Instant::now();
        if self.logged.is_none_or(|last| now - last >= LOGGED) {
            self.logged = Some(now);
            let so_far = self.turned_out;
            tracing::warn!(?peer, so_far, of, "too many dials without a word: the oldest go");
        }
    }

    fn remove(&mut self, number: u64) -> Option<Guest> {
        let guest = self.by_number.remove(&number)?;
        if let Some(n) = self.of_peer.get_mut(&guest.peer) {
            *n -= 1;
            if *n == 0 {
                self.of_peer.remove(&guest.peer);
            }
        }
        Some(guest)
    }
}

impl Visit {
    /// The connection's stream, of which the first byte is noted.
    pub(crate) fn listen<S>(&self, stream: S) -> Heard<S> {
        Heard { stream, spoke: Some(Arc::clone(&self.spoke)) }
    }

    /// Its first byte came.
    pub(crate) fn spoke(&self) {
        self.spoke.store(true, Relaxed);
    }

    /// Returns when it is to make room.
    ///
    /// # Cancel safety
    /// A dropped call changes nothing.
    pub(crate) async fn turned_out(&self) {
        self.out.cancelled().await;
    }

    /// Returns after this time if nothing came.
    ///
    /// # Cancel safety
    /// A dropped call begins anew.
    pub(crate) async fn silent_for(&self, limit: Duration) {
        sleep(limit).await;
        if self.spoke.load(Relaxed) {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.lobby.guests.lock().remove(self.number);
    }
}

/// A stream whose first byte is noted.
#[derive(Debug)]
pub(crate) struct Heard<S> {
    stream: S,
    /// `None` once it came.
    spoke: Option<Arc<AtomicBool>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Heard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before
            && let Some(spoke) = self.spoke.take()
        {
            spoke.store(true, Relaxed);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Heard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(n: u8) -> Origin {
        Origin::of(IpAddr::from([10, 0, 0, n]))
    }

    #[test]
    fn the_oldest_silent_one_of_a_crowd_goes_and_who_speaks_stays() {
        let lobby = Lobby::new("workers", MOST);
        let worker = lobby.enter(host(1));
        worker.spoke.store(true, Relaxed);
        let silent: Vec<_> = (0..2_000).map(|_| lobby.enter(host(1))).collect();
        assert_eq!(lobby.len(), MOST / OF_A_PEER);
        let (gone, there) = silent.split_at(silent.len() - (MOST / OF_A_PEER - 1));
        assert!(gone.iter().all(|visit| visit.out.is_cancelled()));
        assert!(there.iter().all(|visit| !visit.out.is_cancelled()));
        assert!(!worker.out.is_cancelled());
        // where all have said something, it is the oldest of them
        there.iter().for_each(|visit| visit.spoke.store(true, Relaxed));
        let _one_more = lobby.enter(host(1));
        assert!(worker.out.is_cancelled() && !there[0].out.is_cancelled());
        drop((silent, worker));
        assert_eq!(lobby.len(), 1);
    }

    #[test]
    fn a_crowd_from_many_hosts_is_thinned_where_it_is_thickest() {
        let lobby = Lobby::new("workers", MOST);
        let crowd: Vec<_> =
            (1..=4).flat_map(|n| (0..240).map(move |_| n)).map(|n| lobby.enter(host(n))).collect();
        let worker = lobby.enter(host(9));
        let more: Vec<_> = (0..500).map(|i| lobby.enter(host(10 + (i % 5) as u8))).collect();
        assert_eq!(lobby.len(), MOST);
        assert!(!worker.out.is_cancelled());
        drop((crowd, more, worker));
        assert_eq!((lobby.len(), lobby.guests.lock().of_peer.len()), (0, 0));
    }

    #[test]
    fn one_network_is_one_peer() {
        let of = |text: &str| Origin::of(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
