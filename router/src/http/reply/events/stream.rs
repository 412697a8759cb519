//! How far an answer has come that is sent as events: whoever asks gets the next ones.

use std::collections::VecDeque;
use std::io;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;

use super::split::{fits, split};
use super::{Cancelled, EventWriter};
use crate::error::{Causes, RouteError};
use crate::http::call::Ending;
use crate::http::reply::answers::Answers;
use crate::request::Delta;

pub(super) struct Stream<W> {
    /// Written before anything else is asked for.
    ready: VecDeque<Delta>,
    /// `None` once all is said.
    pub(super) answers: Option<Answers>,
    writer: W,
    ending: Ending,
    cancelled: Option<Cancelled>,
    /// The next events need a token.
    awaits_token: bool,
    /// The client was cut off for taking nothing. Should it read on, it finds its connection closed.
    cut_off: bool,
}

impl<W: EventWriter> Stream<W> {
    /// Begins with the deltas of `ready`.
    pub(super) fn new(ready: VecDeque<Delta>, answers: Answers, writer: W, ending: Ending) -> Self {
        let cancelled = writer.cancelled();
        let (awaits_token, cut_off) = (false, false);
        Self { ready, answers: Some(answers), writer, ending, cancelled, awaits_token, cut_off }
    }

    /// What comes next of an answer of one choice is made of its next token: neither of what is there already nor of its end.
    pub(super) fn awaits_token(&self) -> bool {
        self.awaits_token && self.answers.is_some()
    }

    /// The last events are out, and nothing is wrong with them.
    pub(super) fn is_whole(&self) -> bool {
        self.answers.is_none() && !self.cut_off
    }

    /// Appends the next events; `None` after the last ones.
    ///
    /// # Errors
    /// The connection is to be cut.
    pub(super) fn poll_events(
        &mut self,
        context: &mut Context<'_>,
        out: &mut BytesMut,
    ) -> Poll<Option<io::Result<()>>> {
        if std::mem::take(&mut self.cut_off) {
            return Poll::Ready(Some(Err(io::Error::other("the client took nothing"))));
        }
        let Some(answers) = &mut self.answers else { return Poll::Ready(None) };
        let begin = out.len();
        loop {
            let delta = match self.ready.pop_front() {
                Some(ready) => {
                    if self.ready.is_empty() {
                        self.ready = VecDeque::new(); // most streams never need it again
                    }
                    Some(Ok(ready))
                }
                None => {
                    let cancelled = self.cancelled.as_mut();
                    if cancelled
                        .is_some_and(|cancelled| cancelled.as_mut().poll(context).is_ready())
                    {
                        self.ending.failed(&RouteError::ClientGone);
                        self.writer.cancel(answers.usage(), out);
                        self.answers = None;
                        break;
                    }
                    match ready!(answers.poll_next(context)) {
                        Some(Ok(delta)) if !fits(&delta) => {
                            self.ready = split(delta);
                            continue;
                        }
                        next => next,
                    }
                }
            };
            let usage = answers.usage();
            let written = match delta {
                Some(Ok(delta)) => {
                    let written = self.writer.delta(&delta, usage, out);
                    let ends_early = self.writer.ends_early();
                    if ends_early {
                        answers.end(delta.choice);
                    }
                    self.awaits_token = delta.finish.is_none()
                        && !ends_early
                        && self.ready.is_empty()
                        && !answers.holds_tokens();
                    written
                }
                Some(Err(error)) => Err(error),
                None => {
                    let usage = self.writer.with_reasoning(usage);
                    self.ending.answered(usage);
                    self.writer.end(usage, self.ending.comment(), out);
                    self.answers = None;
                    break;
                }
            };
            if let Err(error) = written {
                tracing::warn!(error = %Causes(&error), "an answer failed after its first byte");
                self.ending.failed(&error);
                self.cut_off = matches!(error, RouteError::ClientGone);
                self.writer.failed(error, out);
                self.answers = None;
                break;
            }
            if out.len() > begin {
                break;
            } // else all of it is held back until the next token decides
        }
        Poll::Ready(Some(Ok(())))
    }
}
