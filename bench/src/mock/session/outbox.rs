//! What goes to the router. A slow router slows no step: what its socket does not take adds up here, request by request, as
//! it does in the outbox of a worker with a model.

use std::collections::HashMap;
use std::io;
use std::mem;

use headrace_router::core::frame::{Frame, Output, RequestId, Step};
use headrace_router::fleet::codec::{CodecError, FrameWriter};
use tokio::io::AsyncWrite;

/// Ends of requests that the router has not taken yet. One that asks on and takes nothing is not heard until it does. As in
/// `headrace.worker.outbox`.
const MOST_ENDS: usize = 16_384;
/// Ids in one `Step`; keeps a frame below its limit.
const FRAME_IDS: usize = 1 << 18;

/// Frames on their way to one router.
pub(super) struct Outbox<W> {
    writer: FrameWriter<W>,
    /// The socket has not taken everything: frames wait here.
    is_full: bool,
    /// Of what waits: events of the cache and the like, which come before the steps.
    before: Vec<Frame>,
    /// All steps that wait, as one.
    step: Option<Step>,
    /// Where the outputs of a request are in `step`.
    places: HashMap<RequestId, usize>,
    /// Ends of requests and of the link.
    after: Vec<Frame>,
}

impl<W: AsyncWrite + Unpin> Outbox<W> {
    /// Goes on after what `writer` has.
    pub(super) fn new(writer: FrameWriter<W>) -> Self {
        Self {
            writer,
            is_full: false,
            before: Vec::new(),
            step: None,
            places: HashMap::new(),
            after: Vec::new(),
        }
    }

    /// Adds a frame to what is to be sent.
    ///
    /// # Errors
    /// It is too long for a frame.
    pub(super) fn push(&mut self, frame: Frame) -> Result<(), CodecError> {
        if !self.is_full {
            return self.writer.push(&frame);
        }
        let ends = matches!(
            frame,
            Frame::Freed(_)
                | Frame::Failed(_)
                | Frame::Transferred(_)
                | Frame::Offer(_)
                | Frame::Bye(_)
        );
        if let Frame::Step(step) = frame {
            self.join(step);
        } else if ends {
            self.after.push(frame);
        } else {
            self.before.push(frame);
        }
        Ok(())
    }

    /// Something is to be sent.
    pub(super) fn is_owing(&self) -> bool {
        self.writer.pending() > 0 || self.waits()
    }

    /// The router takes less than it asks for.
    pub(super) fn is_crowded(&self) -> bool {
        self.after.len() >= MOST_ENDS
    }

    /// Sends everything.
    ///
    /// # Errors
    /// Those of the socket, or a frame is too long.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing: the next one goes on. What is pushed meanwhile is joined.
    pub(super) async fn flush(&mut self) -> io::Result<()> {
        loop {
            self.is_full = true;
            self.writer.flush().await?;
            self.is_full = false;
            if !self.waits() {
                return Ok(());
            }
            self.release().map_err(io::Error::other)?;
        }
    }

    /// Sends everything, and closes the link.
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub(super) async fn close(&mut self) -> io::Result<()> {
        self.flush().await?;
        self.writer.close().await
    }

    fn waits(&self) -> bool {
        self.step.is_some() || !self.before.is_empty() || !self.after.is_empty()
    }

    fn release(&mut self) -> Result<(), CodecError> {
        for frame in mem::take(&mut self.before) {
            self.writer.push(&frame)?;
        }
        self.places.clear();
        for part in self.step.take().into_iter().flat_map(parts) {
            self.writer.push(&Frame::Step(part))?;
        }
        mem::take(&mut self.after).iter().try_for_each(|frame| self.writer.push(frame))
    }

    /// What is said of the machine is as of the last step.
    fn join(&mut self, mut step: Step) {
        let Some(waiting) = &mut self.step else {
            let places = step.outputs.iter().enumerate();
            self.places = places.map(|(place, output)| (output.request, place)).collect();
            self.step = Some(step);
            return;
        };
        let mut outputs = mem::take(&mut waiting.outputs);
        for output in mem::take(&mut step.outputs) {
            let next = outputs.len();
            let place = *self.places.entry(output.request).or_insert(next);
            match outputs.get_mut(place) {
                Some(before) => add(before, output),
                None => outputs.push(output),
            }
        }
        *waiting = Step { outputs, ..step };
    }
}

fn add(before: &mut Output, output: Output) {
    before.ids.extend(output.ids);
    match (&mut before.logprobs, output.logprobs) {
        (Some(all), Some(more)) => all.extend(more),
        (all, more) => *all = all.take().or(more),
    }
    before.finish = output.finish.or(before.finish);
    before.cached_tokens = before.cached_tokens.or(output.cached_tokens);
    before.prompt_logprobs = before.prompt_logprobs.take().or(output.prompt_logprobs);
    before.drafted += output.drafted;
    before.accepted += output.accepted;
    before.pooled = before.pooled.take().or(output.pooled);
}

/// The step as one frame, or as several that each have few enough ids.
fn parts(mut step: Step) -> Vec<Step> {
    let outputs = mem::take(&mut step.outputs);
    let mut parts = vec![Step { outputs: Vec::new(), ..step.clone() }];
    let mut ids = 0;
    for output in outputs {
        ids += output.ids.len();
        if ids > FRAME_IDS && ids > output.ids.len() {
            ids = output.ids.len();
            parts.push(Step { outputs: Vec::new(), ..step.clone() });
        }
        parts.last_mut().expect("there is a first one").outputs.push(output);
    }
    parts
}

#[cfg(test)]
mod tests {
    use headrace_router::core::frame::{Blocks, Finish, Freed, Load, TokenLogprob};
    use headrace_router::fleet::codec::FrameReader;
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const LIMIT: usize = 64 << 20;

    fn output(request: u64, ids: &[u32]) -> Output {
        Output {
            request: RequestId(request),
            ids: ids.to_vec(),
            logprobs: None,
            finish: None,
            cached_tokens: None,
            prompt_logprobs: None,
            drafted: 0,
            accepted: 0,
            pooled: None,
        }
    }

    fn step(number: u64, outputs: Vec<Output>) -> Step {
        Step {
            step: number,
            ms: 1.0,
            waited_us: 0,
            prefill_tokens: 0,
            prefill_context: 0,
            decode_rows: 0,
            kv_tokens: 0,
            waiting_tokens: 0,
            drafted: 0,
            accepted: 0,
            load: Load::default(),
            outputs,
        }
    }

    fn blocks(sequence: u64) -> Frame {
        let (stored, removed) = (Vec::new(), Vec::new());
        Frame::Blocks(Blocks { epoch: 1, sequence, stored, removed, cleared: false, tier: 0 })
    }

    fn freed(request: u64) -> Frame {
        Frame::Freed(Freed { request: RequestId(request), blocks: 1 })
    }

    /// An outbox whose socket took a part of the first step, and the socket's other end.
    async fn full() -> (Outbox<DuplexStream>, FrameReader<DuplexStream>) {
        let (ours, theirs) = duplex(8);
        let mut outbox = Outbox::new(FrameWriter::new(ours));
        outbox.push(Frame::Step(step(1, vec![output(7, &[1])]))).unwrap();
        tokio::select! {
            biased;
            _ = outbox.flush() => panic!("the socket takes eight bytes"),
            () = std::future::ready(()) => {}
        }
        (outbox, FrameReader::new(theirs, LIMIT))
    }

    async fn all(
        mut outbox: Outbox<DuplexStream>,
        mut reader: FrameReader<DuplexStream>,
    ) -> Vec<Frame> {
        let sends = async move { outbox.close().await.unwrap() };
        let reads = async {
            let mut frames = Vec::new();
            while let Some(frame) = reader.next().await.unwrap() {
                frames.push(frame);
            }
            frames
        };
        tokio::join!(sends, reads).1
    }

    #[tokio::test]
    async fn steps_that_wait_become_one_between_events_and_ends() {
        let (mut outbox, reader) = full().await;
        outbox.push(blocks(2)).unwrap();
        let begun = Output { cached_tokens: Some(16), ..output(8, &[4]) };
        outbox.push(Frame::Step(step(2, vec![output(7, &[2]), begun.clone()]))).unwrap();
        outbox.push(blocks(3)).unwrap();
        let ends = Output { finish: Some(Finish::Length), drafted: 2, ..output(7, &[3]) };
        let ends = Output { accepted: 1, ..ends };
        outbox.push(Frame::Step(step(3, vec![ends.clone(), output(9, &[5])]))).unwrap();
        outbox.push(freed(7)).unwrap();
        outbox.push(Frame::Step(step(4, vec![output(8, &[6])]))).unwrap();
        let joined = vec![
            Output { ids: vec![2, 3], ..ends },
            Output { ids: vec![4, 6], ..begun },
            output(9, &[5]),
        ];
        let first = Frame::Step(step(1, vec![output(7, &[1])]));
        let expected = vec![first, blocks(2), blocks(3), Frame::Step(step(4, joined)), freed(7)];
        assert_eq!(all(outbox, reader).await, expected);
    }

    #[tokio::test]
    async fn what_a_socket_takes_is_joined_with_nothing() {
        let (ours, theirs) = duplex(1 << 16);
        let mut outbox = Outbox::new(FrameWriter::new(ours));
        let steps = [1, 2].map(|number| Frame::Step(step(number, vec![output(7, &[9])])));
        for step in &steps {
            outbox.push(step.clone()).unwrap();
            assert!(outbox.is_owing());
            outbox.flush().await.unwrap();
            assert!(!outbox.is_owing());
        }
        assert_eq!(all(outbox, FrameReader::new(theirs, LIMIT)).await, steps);
    }

    #[tokio::test]
    async fn a_log_probability_stays_with_its_token() {
        let (mut outbox, reader) = full().await;
        let scored = |id, logprob| {
            let logprobs = Some(vec![TokenLogprob { logprob, top: Vec::new() }]);
            Output { logprobs, ..output(8, &[id]) }
        };
        outbox.push(Frame::Step(step(2, vec![scored(1, -1.0)]))).unwrap();
        outbox.push(Frame::Step(step(3, vec![scored(2, -2.0)]))).unwrap();
        let frames = all(outbox, reader).await;
        let Frame::Step(joined) = &frames[1] else { panic!("{frames:?}") };
        let logprobs = joined.outputs[0].logprobs.as_ref().unwrap();
        assert_eq!(joined.outputs[0].ids, [1, 2]);
        assert_eq!(logprobs.iter().map(|at| at.logprob).collect::<Vec<_>>(), [-1.0, -2.0]);
    }

    #[test]
    fn a_step_of_very_many_ids_is_several_frames() {
        let ids = vec![0; FRAME_IDS - 1];
        let mut long = vec![output(1, &ids), output(2, &[1]), output(3, &[1]), output(4, &ids)];
        long.push(output(5, &[1]));
        let counts: Vec<_> = parts(step(5, long)).iter().map(|part| part.outputs.len()).collect();
        assert_eq!(counts, [2, 2, 1]);
        assert_eq!(parts(step(5, Vec::new())).len(), 1, "a heartbeat");
        let longer = vec![0; FRAME_IDS + 1];
        assert_eq!(parts(step(5, vec![output(1, &longer)])).len(), 1, "no empty part");
    }

    #[tokio::test]
    async fn a_router_that_asks_on_and_takes_nothing_is_not_heard() {
        let (mut outbox, _reader) = full().await;
        for request in 0..MOST_ENDS {
            assert!(!outbox.is_crowded());
            outbox.push(freed(u64::try_from(request).unwrap())).unwrap();
        }
        assert!(outbox.is_crowded());
    }
}
