//! What a link does with legs: takes them in, lets them go on, gives them up, and says what two workers have to do with
//! each other.

use std::time::{Duration, Instant};

use anyhow::bail;
use headrace_router::core::blocks::{BlockHash, hash_blocks_le};
use headrace_router::core::frame::{
    Continue, Failed, FailureKind, Fetch, Finish, Frame, Freed, KvReady, Output, RequestId, Step,
    Submit, TransferBackend, TransferFailure, Transferred,
};
use tokio::io::AsyncWrite;

use super::Session;
use crate::mock::engine::{Leg, Pooled, Scores};
use crate::mock::exchange::Pulled;
use crate::mock::kv_legs::Say;

/// Why a request with a grammar is refused: a random answer would break it, and say nothing about that.
const FOLLOWS_NO_GRAMMAR: &str = "a mock worker has no model whose answer could follow a grammar; `headrace mock --script FILE` gives it texts to answer with";

impl<W: AsyncWrite + Unpin> Session<'_, W> {
    /// The other worker's part of an answer is over.
    pub(super) fn go_on(&mut self, go: &Continue) -> anyhow::Result<()> {
        let generated = u32::try_from(go.generated.len() / 4).unwrap_or(u32::MAX);
        if !go.generated.len().is_multiple_of(4) {
            bail!("{} bytes of tokens in Continue", go.generated.len());
        }
        let said = self.worker.kv_legs(Instant::now(), |p| p.go_on(go.request, generated));
        self.say(said)
    }

    /// Tells the router what two workers have to do with each other.
    pub(super) fn say(&mut self, said: Vec<Say>) -> anyhow::Result<()> {
        for say in said {
            match say {
                Say::KvReady { request, ticket, lease_ms } => {
                    self.outbox.push(Frame::KvReady(KvReady { request, ticket, lease_ms }))?;
                }
                Say::Freed(freed) => self.push_freed(freed)?,
                Say::Failed(failed) => self.outbox.push(Frame::Failed(failed))?,
                Say::Transferred(pulled) => {
                    let source = self.sources.remove(&pulled.request).unwrap_or_default();
                    self.push_transferred(&pulled, source)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn cancel(&mut self, request: RequestId) -> anyhow::Result<Option<Freed>> {
        let (said, freed) = self.worker.kv_legs(Instant::now(), |kv_legs| kv_legs.cancel(request));
        self.say(said)?;
        Ok(freed)
    }

    pub(super) fn submit(&mut self, submit: Submit) -> anyhow::Result<()> {
        let request = submit.request;
        let deadline = submit.deadline_ms;
        let source = submit.kv_from.as_ref().map(|kv_from| kv_from.worker.clone());
        match self.take(submit) {
            Ok(shortened) => {
                self.sources.extend(source.map(|source| (request, source)));
                if shortened {
                    self.shortened.insert(request);
                }
                if let Some(deadline_ms) = deadline {
                    let at = Instant::now() + Duration::from_millis(deadline_ms.min(1 << 32));
                    self.deadlines.insert((at, request), ());
                }
            }
            Err(failed) => self.outbox.push(Frame::Failed(failed))?,
        }
        Ok(())
    }

    /// Gives a request to the engine; true if its answer will end before the client's limit.
    fn take(&mut self, submit: Submit) -> Result<bool, Failed> {
        let Submit { request, mut tokens, sampling, max_tokens, salt, resume, pooling, .. } =
            submit;
        let fail = |kind, message: &str| Err(Failed { request, kind, message: message.into() });
        if self.drain_until.is_some() {
            return fail(FailureKind::Draining, "this worker leaves");
        }
        if submit.kv_transfer.is_some() && submit.kv_from.is_some() {
            return fail(FailureKind::Unsupported, "a leg is pulled or pulls, not both");
        }
        let scores = Scores::of(request, &sampling, &tokens)?;
        let prompt_bytes = tokens.len();
        let resumed = resume.map_or(0, |resume| {
            tokens.extend_from_slice(&resume.generated);
            u32::try_from(resume.generated.len() / 4).unwrap_or(u32::MAX)
        });
        let vocab = self.worker.vocab_size();
        let known = |id: &[u8]| u32::from_le_bytes(id.try_into().expect("4 bytes")) < vocab;
        if tokens.len() % 4 != 0 || !tokens.chunks_exact(4).all(known) {
            return fail(FailureKind::BadToken, "a token is not in the vocabulary");
        }
        let prompt_tokens = u32::try_from(tokens.len() / 4).unwrap_or(u32::MAX);
        let (prompt, generated) = tokens.split_at(prompt_bytes);
        let pooled = pooling.map(|pooling| Pooled::of(pooling, prompt));
        if pooled.is_some() && (max_tokens > 0 || !generated.is_empty()) {
            return fail(FailureKind::BadSampling, "a pooled prompt has no answer");
        }
        let max_tokens = if pooled.is_some() { 1 } else { max_tokens };
        let scripted = self.worker.scripted(prompt, generated, &submit.stop_ids);
        let scripted = match (scripted, sampling.grammar.is_some()) {
            (None, true) => return fail(FailureKind::BadSampling, FOLLOWS_NO_GRAMMAR),
            (None, false) => None,
            (Some(Err(lacks)), _) => return fail(FailureKind::Unsupported, &lacks),
            (Some(Ok(answer)), grammar) => {
                self.worker.note_grammar(grammar);
                Some(answer)
            }
        };
        let (max_tokens, shortened) = match &scripted {
            Some(answer) => {
                let stops = answer.finish == Finish::Stop && answer.len() <= max_tokens;
                (max_tokens.min(answer.len()), stops)
            }
            None => {
                let longest = self.worker.longest_answer();
                let shortened = max_tokens > longest && !sampling.ignore_eos;
                (if shortened { longest } else { max_tokens }, shortened)
            }
        };
        let root = BlockHash::root(&self.hash_key, &salt);
        let hashes = hash_blocks_le(&self.hash_key, root, &tokens, self.worker.block_tokens());
        self.worker.engine.submit(Leg {
            request,
            keys: hashes.into_iter().map(|hash| hash.key().0).collect(),
            prompt_tokens,
            max_tokens: max_tokens.saturating_sub(resumed),
            ends_after: None,
            seed: sampling.seed,
            resumed,
            kv_transfer: submit.kv_transfer.map(|kv_transfer| kv_transfer.lease_ms),
            arrives: submit.kv_from.map(|kv_from| kv_from.timeout_ms),
            scores,
            scripted,
            pooled,
        })?;
        Ok(shortened)
    }

    /// Gives up what is too late.
    pub(super) fn expire(&mut self, now: Instant) -> anyhow::Result<()> {
        let mut outputs = Vec::new();
        let mut freed = Vec::new();
        while let Some(entry) = self.deadlines.first_entry().filter(|entry| entry.key().0 <= now) {
            let ((_, request), ()) = entry.remove_entry();
            if let Some(blocks) = self.cancel(request)? {
                freed.push(blocks);
                outputs.push(Output {
                    request,
                    ids: Vec::new(),
                    logprobs: None,
                    finish: Some(Finish::Cancelled),
                    cached_tokens: None,
                    prompt_logprobs: None,
                    drafted: 0,
                    accepted: 0,
                    pooled: None,
                });
            }
        }
        if outputs.is_empty() {
            return Ok(());
        }
        self.push_step(Step { outputs, ..self.worker.engine.heartbeat() })?;
        for freed in freed {
            self.push_freed(freed)?;
        }
        Ok(())
    }

    pub(super) fn push_freed(&mut self, freed: Freed) -> anyhow::Result<()> {
        self.shortened.remove(&freed.request);
        self.sources.remove(&freed.request);
        Ok(self.outbox.push(Frame::Freed(freed))?)
    }

    /// Blocks have no contents here that could be moved into a cache.
    pub(super) fn refuse(&mut self, fetch: Fetch) -> anyhow::Result<()> {
        let (request, error) = (fetch.request, Some(TransferFailure::Refused));
        let pulled = Pulled { request, from: None, blocks: 0, bytes: 0, ms: 0.0, error };
        self.push_transferred(&pulled, fetch.kv_from.worker)
    }

    fn push_transferred(&mut self, pulled: &Pulled, worker: String) -> anyhow::Result<()> {
        let Pulled { request, blocks, bytes, ms, error, .. } = *pulled;
        let backend = error.is_none().then_some(TransferBackend::Mock);
        let transferred = Transferred { request, worker, backend, blocks, bytes, ms, error };
        Ok(self.outbox.push(Frame::Transferred(transferred))?)
    }
}
