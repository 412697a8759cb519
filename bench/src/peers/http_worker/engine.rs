//! Steps: each gives every answer that runs a token, with a write of its own.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::mem;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};

use super::answer::Parts;
use crate::mock::clock::Clock;

/// With nothing that takes a token, a step without length is as long as this: it would only burn a core.
const WHEN_ALL_ARE_FULL: Duration = Duration::from_micros(200);

/// One answer.
pub(super) struct Row {
    socket: Rc<TcpStream>,
    left: u32,
    /// What the prompt adds to the first step.
    prefill: Duration,
    parts: Parts,
    begun: bool,
    /// What the socket did not take. Until it does, there are no further tokens.
    unsent: Vec<u8>,
    done: Option<oneshot::Sender<bool>>,
}

/// What became of an answer in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stepped {
    Wrote,
    /// Its reader takes nothing.
    Full,
    Over,
}

/// What became of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    All,
    /// The socket is full, and the rest is kept.
    Part,
    /// Who asked is gone.
    HungUp,
}

/// Answers that run, and those that join with the next step.
#[derive(Default)]
pub(super) struct Engine {
    arrived: Vec<Row>,
    running: Vec<Row>,
    bell: Rc<Notify>,
}

impl Row {
    pub(super) fn new(
        socket: Rc<TcpStream>,
        tokens: u32,
        prefill: Duration,
        parts: Parts,
        done: oneshot::Sender<bool>,
    ) -> Self {
        let done = Some(done);
        Self { socket, left: tokens, prefill, parts, begun: false, unsent: Vec::new(), done }
    }

    /// The next token, where the socket has room for it.
    fn step(&mut self, scratch: &mut Vec<u8>) -> Stepped {
        if !self.unsent.is_empty() {
            let unsent = mem::take(&mut self.unsent);
            let sent = self.send(&unsent);
            if sent != Sent::All || self.left == 0 {
                return self.after(sent);
            }
        }
        self.left -= 1;
        let middle = self.begun && self.left > 0;
        self.begun = true;
        let event = self.parts.event.clone();
        if let Some(event) = event.filter(|_| middle) {
            let sent = self.send(&event);
            return self.after(sent);
        }
        scratch.clear();
        scratch.extend_from_slice(&mem::take(&mut self.parts.head));
        scratch.extend_from_slice(self.parts.event.as_deref().unwrap_or_default());
        if self.left == 0 {
            scratch.append(&mut self.parts.end);
        }
        if scratch.is_empty() {
            return Stepped::Wrote; // a token of an answer that comes whole
        }
        let sent = self.send(scratch);
        self.after(sent)
    }

    fn after(&mut self, sent: Sent) -> Stepped {
        match sent {
            Sent::All if self.left == 0 => {
                if let Some(done) = self.done.take() {
                    let _ = done.send(true); // its connection may be gone
                }
                Stepped::Over
            }
            Sent::All => Stepped::Wrote,
            Sent::Part => Stepped::Full,
            Sent::HungUp => Stepped::Over,
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> Sent {
        while !bytes.is_empty() {
            match self.socket.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.unsent.extend_from_slice(bytes);
                    return Sent::Part;
                }
                Err(_) => return Sent::HungUp,
            }
        }
        Sent::All
    }
}

impl Engine {
    /// From the next step on it runs.
    pub(super) fn join(&mut self, row: Row) {
        self.arrived.push(row);
        self.bell.notify_one();
    }

    /// Begins a step, and tells how long the prompts that joined make it; `None` without anything to do.
    fn begin(&mut self) -> Option<Duration> {
        let prefill = self.arrived.iter().map(|row| row.prefill).sum();
        self.running.append(&mut self.arrived);
        (!self.running.is_empty()).then_some(prefill)
    }

    /// A token for each; false where no socket took any.
    fn end(&mut self, scratch: &mut Vec<u8>) -> bool {
        let mut wrote = false;
        self.running.retain_mut(|row| {
            let stepped = row.step(scratch);
            wrote |= stepped != Stepped::Full;
            stepped != Stepped::Over
        });
        wrote
    }
}

/// Steps for ever. A step begins when the one before it should have ended, as an engine's does.
pub(super) async fn run(engine: &RefCell<Engine>, clock: &Clock, step: Duration) {
    let bell = Rc::clone(&engine.borrow().bell);
    let mut scratch = Vec::new();
    let mut at = Instant::now();
    loop {
        let begun = engine.borrow_mut().begin();
        let Some(prefill) = begun else {
            bell.notified().await;
            at = Instant::now();
            continue;
        };
        let length = step + prefill;
        if length.is_zero() {
            tokio::task::yield_now().await; // sockets are read meanwhile
            at = Instant::now();
        } else {
            at += length;
            let _ = clock.at(at).await; // it outlives the engine
        }
        let wrote = engine.borrow_mut().end(&mut scratch);
        if !wrote && length.is_zero() {
            let _ = clock.at(Instant::now() + WHEN_ALL_ARE_FULL).await;
        }
    }
}
