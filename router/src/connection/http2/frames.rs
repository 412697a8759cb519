//! The frames of HTTP/2 as they are read. Most of them carry something: the head of a request, or a part of its body. Pings,
//! settings, windows and resets carry nothing, and a client may send them without end, each for an answer or for a
//! look at what it changes. Each connection has so many of them, and gets more with what it asks for and is sent: a client
//! opens its windows again, and measures its line, as often as data comes. One that sends more floods.
//!
//! As nginx, Envoy and Go end such connections, this one does, with `ENHANCE_YOUR_CALM`. They are told apart by their number,
//! and not by their share of the bytes: a window costs its receiver as much as a request's body of 16 KiB.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::time::Instant;

/// Of them at once; half a millisecond of work. A guess: ten times what a client sends before its first request.
const FREE: usize = 300;
/// And for each request, or part of an answer: two windows, a ping, and a reset.
const WITH_EACH: usize = 4;
/// And for each second: a client that pings while it waits.
const A_SECOND: usize = 10;

/// Length, type, flags, stream: RFC 9113, 4.1.
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;

/// See the head of this file.
pub(in crate::connection) struct Frames {
    head: [u8; HEAD],
    /// Of the head, read so far.
    known: usize,
    /// Of the frame behind its head, to come.
    rest: usize,
    /// That carry nothing and may still come.
    left: usize,
    since: Instant,
}

impl Frames {
    /// Those that follow on so many bytes that are no frames.
    pub(in crate::connection) fn behind(preface: usize) -> Self {
        Self { head: [0; HEAD], known: 0, rest: preface, left: FREE, since: Instant::now() }
    }

    /// Takes note of what was read. `carried`: parts of answers that were sent since it was looked at. False: it floods.
    pub(in crate::connection) fn read(&mut self, mut bytes: &[u8], carried: &AtomicUsize) -> bool {
        let mut floods = false;
        loop {
            let skipped = self.rest.min(bytes.len());
            self.rest -= skipped;
            bytes = &bytes[skipped..];
            let known = bytes.len().min(HEAD - self.known);
            self.head[self.known..self.known + known].copy_from_slice(&bytes[..known]);
            self.known += known;
            bytes = &bytes[known..];
            if self.known < HEAD {
                return !floods;
            }
            self.known = 0;
            let [a, b, c, kind, ..] = self.head;
            self.rest = u32::from_be_bytes([0, a, b, c]) as usize;
            match kind {
                HEADERS => self.left += WITH_EACH,
                // the head that it belongs to has a longest length, and h2 counts data that are empty
                CONTINUATION | DATA => {}
                _ if self.left == 0 && !self.refill(carried) => floods = true,
                _ => self.left -= 1,
            }
        }
    }

    /// False if there is nothing to fill it with.
    fn refill(&mut self, carried: &AtomicUsize) -> bool {
        let seconds = usize::try_from(self.since.elapsed().as_secs()).unwrap_or(FREE);
        if seconds > 0 {
            self.since = Instant::now();
        }
        let by_time = seconds.saturating_mul(A_SECOND).min(FREE);
        self.left = by_time + carried.swap(0, Relaxed).saturating_mul(WITH_EACH);
        self.left > 0
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    const PING: u8 = 6;
    const SETTINGS: u8 = 4;
    const PREFACE: usize = 24;

    fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&len[1..], &[kind, 0, 0, 0, 0, 1], body].concat()
    }

    fn frames() -> (Frames, AtomicUsize) {
        (Frames::behind(0), AtomicUsize::new(0))
    }

    /// How many of `each` are read before it floods.
    fn most(frames: &mut Frames, carried: &AtomicUsize, each: &[u8]) -> usize {
        let mut n = 0;
        while frames.read(each, carried) {
            n += 1;
            assert!(n < 10 * FREE, "it never floods");
        }
        n
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_carry_nothing_are_counted_however_they_are_cut() {
        for (kind, body) in [(PING, &[0; 8][..]), (SETTINGS, &[]), (3, &[0; 4]), (200, b"?")] {
            let (mut frames, carried) = frames();
            assert_eq!(most(&mut frames, &carried, &frame(kind, body)), FREE, "{kind}");
            assert!(!frames.read(&frame(kind, body), &carried), "and it is not forgotten");
        }
        for cut in [1, 2, 9, 10, 16, 17, 18, 1_000] {
            let (mut frames, carried) = (Frames::behind(PREFACE), AtomicUsize::new(0));
            let all = [vec![6; PREFACE], frame(PING, &[6; 8]).repeat(FREE)].concat();
            assert!(all.chunks(cut).all(|piece| frames.read(piece, &carried)), "by {cut}");
            assert!(!frames.read(&frame(PING, &[6; 8]), &carried), "by {cut}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_carries_something_may_come_without_end() {
        let (mut frames, carried) = frames();
        let body = [PING; 100]; // would be pings, were it frames
        for kind in [DATA, CONTINUATION, HEADERS] {
            let one = frame(kind, &body);
            assert!((0..10 * FREE).all(|_| frames.read(&one, &carried)), "{kind}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_answers_and_time_make_room_for_more() {
        let ping = frame(PING, &[0; 8]);
        let (mut frames, carried) = frames();
        assert!(frames.read(&frame(HEADERS, b"GET"), &carried));
        assert_eq!(most(&mut frames, &carried, &ping), FREE + WITH_EACH);
        carried.store(7, Relaxed);
        assert_eq!(most(&mut frames, &carried, &ping), 7 * WITH_EACH);
        assert_eq!(carried.load(Relaxed), 0, "they count once");
        advance(Duration::from_millis(999)).await;
        assert_eq!(most(&mut frames, &carried, &ping), 0);
        advance(Duration::from_millis(2_001)).await;
        assert_eq!(most(&mut frames, &carried, &ping), 3 * A_SECOND);
        advance(Duration::from_secs(1 << 30)).await;
        assert_eq!(most(&mut frames, &carried, &ping), FREE);
    }
}
