//! Why a request was not served: one enum for the whole way of a request. `http::reject` turns it into a status.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::core::frame::FailureKind;

/// What made an error. Shared, for one link that breaks fails many requests.
pub type Cause = Arc<dyn Error + Send + Sync>;

/// Why a request was not served. The variant decides status and retry; the text is for people.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// The request is wrong; `param` names the field.
    #[error("{message}")]
    BadRequest {
        /// The field, as the client wrote it.
        param: Option<String>,
        /// What is wrong and what would be right.
        message: String,
    },
    /// What the body holds takes too much memory, though the body itself is not too long.
    #[error(
        "what this body holds takes more than {limit} bytes of memory, the limit of one request{}; \
         it has too many small values, too many keys or too deep arrays",
        passed_at(.param.as_deref())
    )]
    BodyTooComplex {
        /// Bytes that one request may take.
        limit: usize,
        /// Where the limit was passed, as the client wrote it.
        param: Option<String>,
    },
    /// What has to be kept of an answer until it can be sent takes too much memory.
    #[error(
        "what is kept of this answer takes more than {limit} bytes of memory, the limit of one request; \
         lower `n`, `max_tokens` or the alternatives of log-probabilities, or set `stream` to true"
    )]
    AnswerTooLarge {
        /// Bytes that one request may take.
        limit: usize,
    },
    /// The prompt does not fit the model.
    #[error(
        "this model's context length is {limit} tokens, but the request needs {got} \
         ({prompt} in the prompt, {answer} for the answer)"
    )]
    ContextLength {
        /// Tokens asked for.
        got: usize,
        /// Of them, prompt.
        prompt: usize,
        /// Of them, answer.
        answer: usize,
        /// The model's limit.
        limit: usize,
    },
    /// The prompt does not fit the model, which its length says, or a part of its tokens.
    #[error(
        "this model's context length is {limit} tokens, but the request needs at least {} \
         (at least {prompt} in the prompt, {answer} for the answer)",
        prompt.saturating_add(*answer)
    )]
    ContextLengthAtLeast {
        /// Tokens of the prompt, at least.
        prompt: usize,
        /// Tokens of the answer.
        answer: usize,
        /// The model's limit for both.
        limit: usize,
    },
    /// The prompt cannot be tokenised in pieces.
    #[error(
        "from byte {at} on, the prompt's text has more than {limit} bytes without a place where this model's \
         tokenizer lets it be cut; break it up with spaces or line breaks"
    )]
    TextWithoutBreaks {
        /// The field, as the client wrote it.
        param: String,
        /// Where they begin in the text, as the template rendered it.
        at: usize,
        /// Most bytes of such a stretch (`--tokenizer-stretch-bytes`).
        limit: usize,
    },
    /// No worker serves this model.
    #[error("the model `{model}` does not exist; served here: {served}")]
    UnknownModel {
        /// As the client wrote it.
        model: String,
        /// Names that would work.
        served: String,
    },
    /// Workers exist for the model but none can take work now, or none has joined yet.
    #[error("no worker is ready to take this request")]
    NoWorker {
        /// When to try again.
        retry_after: Duration,
    },
    /// A bounded queue is full.
    #[error("the server is at capacity ({what}); try again later")]
    Overloaded {
        /// Name of the bound, such as `answers of this tenant`.
        what: &'static str,
        /// When to try again.
        retry_after: Duration,
    },
    /// The key has used what it may.
    #[error("this API key may have {limit} {what}, and has had them; try again in {}", in_seconds(*.retry_after))]
    KeyLimit {
        /// Such as `requests a minute`.
        what: &'static str,
        /// So many.
        limit: u32,
        /// When there are some again.
        retry_after: Duration,
    },
    /// The first token is predicted to come later than the caller can use it.
    #[error(
        "the first token is predicted in {predicted:?}, and was wanted within {deadline:?}; try again later"
    )]
    TooLate {
        /// From now to the first token, as predicted.
        predicted: Duration,
        /// What was asked for.
        deadline: Duration,
        /// When the deadline is likely to be met.
        retry_after: Duration,
    },
    /// A state of the request lasted too long.
    #[error("the request waited {waited:?} {state}, the limit of that state")]
    DeadlineExceeded {
        /// Which state: `for a worker`, `for the first token`, `for the next token`...
        state: &'static str,
        /// Time spent in that state.
        waited: Duration,
    },
    /// The link to the worker broke.
    #[error("worker `{worker}` was lost: {source}")]
    WorkerLost {
        /// The worker's name.
        worker: String,
        /// What was seen of it.
        source: Cause,
    },
    /// The worker answered `Failed`.
    #[error("worker `{worker}` could not serve the request: {message}")]
    WorkerFailed {
        /// The worker's name.
        worker: String,
        /// `Failed.kind`, as the worker sent it.
        kind: FailureKind,
        /// `Failed.message`, as the worker sent it.
        message: String,
    },
    /// The worker sent tokens that cannot be.
    #[error("worker `{worker}` could not serve the request: it sent {what}")]
    WrongOutput {
        /// The worker's name.
        worker: String,
        /// Which tokens it sent.
        what: &'static str,
    },
    /// The router is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The client went away. Nobody reads the answer.
    #[error("the client closed the connection")]
    ClientGone,
    /// A mistake of the router's own, or of the machine. Clients are not told what it was.
    #[error("internal error: {what}")]
    Internal {
        /// What was not to happen.
        what: String,
        /// What made it happen, if that is known.
        source: Option<Box<dyn Error + Send + Sync>>,
    },
}

/// An error with everything that caused it, from the outermost words to the innermost. Words that were said before are
/// left out, as many errors quote what caused them.
pub(crate) struct Causes<'e>(pub(crate) &'e (dyn Error + 'static));

/// A panic, as the cause of an error.
#[derive(Debug, thiserror::Error)]
#[error("panicked: {0}")]
pub(crate) struct Panicked(String);

/// Whole seconds, rounded up, as `Retry-After` says them.
fn in_seconds(time: Duration) -> String {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    format!("{} s", seconds.max(1))
}

fn passed_at(param: Option<&str>) -> String {
    param.map(|param| format!(", which was passed at `{param}`")).unwrap_or_default()
}

impl RouteError {
    /// A mistake of the router's own that nothing else caused.
    pub(crate) fn mistake(what: impl Into<String>) -> Self {
        Self::Internal { what: what.into(), source: None }
    }

    /// What was not to happen, and what made it happen.
    pub(crate) fn internal(
        what: impl Into<String>,
        source: impl Error + Send + Sync + 'static,
    ) -> Self {
        Self::Internal { what: what.into(), source: Some(Box::new(source)) }
    }

    /// The variant as a word, for metrics and logs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::BadRequest { .. } => "bad_request",
            Self::BodyTooComplex { .. } => "body_too_complex",
            Self::AnswerTooLarge { .. } => "answer_too_large",
            Self::ContextLength { .. } | Self::ContextLengthAtLeast { .. } => "context_length",
            Self::TextWithoutBreaks { .. } => "text_without_breaks",
            Self::UnknownModel { .. } => "unknown_model",
            Self::NoWorker { .. } => "no_worker",
            Self::Overloaded { .. } => "overloaded",
            Self::KeyLimit { .. } => "rate_limit_exceeded",
            Self::TooLate { .. } => "deadline_impossible",
            Self::DeadlineExceeded { .. } => "deadline_exceeded",
            Self::WorkerLost { .. } => "worker_lost",
            Self::WorkerFailed { .. } | Self::WrongOutput { .. } => "worker_failed",
            Self::ShuttingDown => "shutting_down",
            Self::ClientGone => "client_gone",
            Self::Internal { .. } => "internal",
        }
    }

    /// True if another worker may succeed where this one failed (as long as nothing was sent to the client).
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::WorkerLost { .. } | Self::WrongOutput { .. } => true,
            Self::WorkerFailed { kind, .. } => kind.is_retryable(),
            Self::BadRequest { .. }
            | Self::BodyTooComplex { .. }
            | Self::AnswerTooLarge { .. }
            | Self::ContextLength { .. }
            | Self::ContextLengthAtLeast { .. }
            | Self::TextWithoutBreaks { .. }
            | Self::UnknownModel { .. }
            | Self::NoWorker { .. }
            | Self::Overloaded { .. }
            | Self::KeyLimit { .. }
            | Self::TooLate { .. }
            | Self::DeadlineExceeded { .. }
            | Self::ShuttingDown
            | Self::ClientGone
            | Self::Internal { .. } => false,
        }
    }
}

impl<'e> Causes<'e> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
        std::iter::successors(Some(self.0), |&error: &&'e (dyn Error + 'static)| error.source())
    }
}

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = String::new();
        for words in self.iter().map(ToString::to_string) {
            if !said.contains(&words) {
                said += if said.is_empty() { "" } else { ": " };
                said += &words;
            }
        }
        f.write_str(&said)
    }
}

impl Panicked {
    /// With what a panic left behind.
    pub(crate) fn with(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Self(text.unwrap_or_else(|| "without words".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("reading the page failed")]
    struct Unread(#[source] io::Error);

    #[test]
    fn an_internal_error_leads_down_to_what_made_it_happen() {
        let error = RouteError::internal("no tokens", Unread(io::Error::other("disk is gone")));
        let unread = error.source().unwrap().downcast_ref::<Unread>().unwrap();
        assert_eq!(unread.source().unwrap().to_string(), "disk is gone");
        assert_eq!(error.to_string(), "internal error: no tokens");
        let told = Causes(&error).to_string();
        assert_eq!(told, "internal error: no tokens: reading the page failed: disk is gone");
        assert!(RouteError::mistake("two ends").source().is_none());
    }

    #[test]
    fn causes_that_an_error_quotes_are_told_once() {
        let source: Cause = Arc::new(Unread(io::Error::other("disk is gone")));
        let error = RouteError::WorkerLost { worker: "w".into(), source };
        let told = Causes(&error).to_string();
        assert_eq!(told, "worker `w` was lost: reading the page failed: disk is gone");
    }

    #[test]
    fn a_panic_keeps_its_words() {
        for (panic, words) in [
            (Box::new("here") as Box<dyn Any + Send>, "panicked: here"),
            (Box::new("there".to_owned()), "panicked: there"),
            (Box::new(7), "panicked: without words"),
        ] {
            assert_eq!(Panicked::with(&*panic).to_string(), words);
        }
    }
}
