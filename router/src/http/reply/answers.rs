//! The answers to all jobs of one HTTP request as one sequence of deltas.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use futures_util::StreamExt as _;
use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;

use crate::app::App;
use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::fleet::stream::DirectReader;
use crate::request::{self, Answer, Delta, Job, Usage};

type Step = (usize, Answer, Option<Result<Delta, RouteError>>);
type Next = Pin<Box<dyn Future<Output = Step> + Send>>;

/// Deltas of one or of many answers. Dropping it drops the answers, which cancels them.
pub(in crate::http) struct Answers {
    source: Source,
    /// Choices per job.
    n: usize,
}

enum Source {
    /// The common case, without any machinery around it.
    One(Answer),
    /// One call of `next` in flight per open answer, and the usage of all so far.
    Many { next: FuturesUnordered<Next>, usage: Vec<Usage> },
}

impl Answers {
    /// Places all jobs, which have the same `n`. If one cannot be placed, none is.
    ///
    /// # Errors
    /// That of the first job that failed.
    ///
    /// # Cancel safety
    /// A dropped call leaves nothing behind.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` has room for its arguments twice")]
    pub(in crate::http) fn place(
        app: &Arc<App>,
        model: &Arc<ServedModel>,
        mut jobs: Vec<Job>,
    ) -> impl Future<Output = Result<Self, RouteError>> + Send {
        async move {
            let n = jobs.first().map_or(0, |job| job.n) as usize;
            let answer = |job| request::answer(app, Arc::clone(model), job);
            let source = if jobs.len() == 1 {
                let job = jobs.pop().expect("there is one");
                Source::One(answer(job).await?)
            } else {
                let answers = try_join_all(jobs.into_iter().map(answer)).await?;
                let usage = answers.iter().map(Answer::usage).collect();
                let next = answers.into_iter().enumerate();
                let next = next.map(|(i, answer)| advance(i, answer)).collect();
                Source::Many { next, usage }
            };
            Ok(Self { source, n })
        }
    }

    /// A choice of the one job whose text is read has said all: its worker is stopped.
    pub(in crate::http) fn end(&mut self, choice: u32) {
        if let Source::One(answer) = &mut self.source {
            answer.end_choice(choice);
        }
    }

    /// What comes next is there already. Only the text of one job is read, and so handed on token by token.
    pub(in crate::http) fn holds_tokens(&self) -> bool {
        match &self.source {
            Source::One(answer) => answer.holds_tokens(),
            Source::Many { .. } => false,
        }
    }

    /// What comes next; `choice` counts through the choices of all jobs.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing.
    pub(in crate::http) async fn next(&mut self) -> Option<Result<Delta, RouteError>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Self::next`].
    pub(in crate::http) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delta, RouteError>>> {
        match &mut self.source {
            Source::One(answer) => answer.poll_next(context),
            Source::Many { next, usage } => loop {
                let Some((job, answer, delta)) = ready!(next.poll_next_unpin(context)) else {
                    return Poll::Ready(None);
                };
                usage[job] = answer.usage();
                let Some(delta) = delta else { continue };
                next.push(advance(job, answer));
                let first = u32::try_from(job * self.n).expect("choices were bounded");
                let delta = delta.map(|delta| Delta { choice: first + delta.choice, ..delta });
                return Poll::Ready(Some(delta));
            },
        }
    }

    /// From now on links call this reader when they bring tokens, where there is one choice.
    pub(in crate::http) fn read_directly(&mut self, reader: Weak<dyn DirectReader>) {
        if let Source::One(answer) = &mut self.source {
            answer.read_directly(reader);
        }
    }

    /// The prompt of the one job whose text is read; empty where there are several.
    pub(in crate::http) fn prompt_ids(&self) -> &[u32] {
        match &self.source {
            Source::One(answer) => answer.prompt_ids(),
            Source::Many { .. } => &[],
        }
    }

    /// Tokens of all jobs so far, final after `next` gave `None`.
    pub(in crate::http) fn usage(&self) -> Usage {
        match &self.source {
            Source::One(answer) => answer.usage(),
            Source::Many { usage, .. } => usage.iter().copied().fold(Usage::default(), sum),
        }
    }
}

fn advance(job: usize, mut answer: Answer) -> Next {
    Box::pin(async move {
        let delta = answer.next().await;
        (job, answer, delta)
    })
}

fn sum(a: Usage, b: Usage) -> Usage {
    Usage {
        prompt_tokens: a.prompt_tokens + b.prompt_tokens,
        completion_tokens: a.completion_tokens + b.completion_tokens,
        cached_tokens: a.cached_tokens + b.cached_tokens,
        accepted_drafts: a.accepted_drafts.saturating_add(b.accepted_drafts),
        rejected_drafts: a.rejected_drafts.saturating_add(b.rejected_drafts),
        reasoning_tokens: a.reasoning_tokens + b.reasoning_tokens,
    }
}
