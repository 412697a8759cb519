//! Texts to vectors: a job for each, some at a time, and what is computed of the vectors.

use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use tokio::time::{Instant, timeout_at};

use super::request::PoolingParams;
use crate::app::App;
use crate::core::frame::Sampling;
use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::http::call::Call;
use crate::http::parse::fields::bad;
use crate::http::parse::ids;
use crate::limits::memory::{MemoryShare, Refused};
use crate::limits::shares::{Account, Holder};
use crate::prompt::{Prompt, StopStrings};
use crate::request::{self, Job, Reading, Usage};

/// Texts of one request that are on workers at once: enough for several workers' batches. The others of a long list wait
/// here rather than in the places of other requests. A guess.
const AT_ONCE: usize = 64;

/// The vectors of all texts of a request, in order.
#[derive(Debug)]
pub(super) struct Vectors {
    pub(super) list: Vec<Vec<f32>>,
    pub(super) usage: Usage,
    /// What they take.
    pub(super) memory: MemoryShare,
}

/// The vectors of `prompts`, whose body was charged to `body`.
///
/// # Errors
/// That the model gives none, that they would be too many, or why one of them did not come: then there are none.
///
/// # Cancel safety
/// A dropped call leaves nothing behind.
pub(super) async fn vectors(
    app: &Arc<App>,
    call: &Call,
    model: &Arc<ServedModel>,
    prompts: Vec<Prompt>,
    how: &PoolingParams,
    body: MemoryShare,
) -> Result<Vectors, RouteError> {
    let begin = Instant::now();
    let width = model.pooled_width as usize;
    if width == 0 {
        let name = &model.name;
        let message = format!(
            "the model `{name}` gives no vectors: its workers keep the hidden states of a prompt to themselves"
        );
        return Err(bad("model", message));
    }
    let (count, bytes) = (prompts.len(), prompts.len() * width * size_of::<f32>());
    if bytes > app.memory.answers.limit() {
        return Err(RouteError::AnswerTooLarge { limit: app.memory.answers.limit() });
    }
    let mut memory = app.memory.answers.share();
    memory.charge(bytes).map_err(Refused::answer)?;
    let (name, body) = (ids::name("embd-"), Arc::new(body));
    let jobs = prompts.into_iter().zip(0_u32..).map(|(prompt, place)| {
        let mut job = job(&name, prompt, how);
        call.apply(&mut job, place);
        job.memory = Some(Arc::clone(&body));
        (place as usize, job)
    });
    let jobs: Vec<_> = jobs.collect();
    drop(body); // from here on it lasts as long as what it was charged for
    let answers = jobs.into_iter().map(|(place, job)| {
        let (app, model) = (Arc::clone(app), Arc::clone(model));
        async move { vector(&app, model, job).await.map(|found| (place, found)) }
    });
    let mut list = vec![Vec::new(); count];
    let mut usage = Usage::default();
    let all = async {
        let mut answers = stream::iter(answers).buffer_unordered(AT_ONCE);
        while let Some((place, (vector, of))) = answers.try_next().await? {
            list[place] = vector;
            usage.prompt_tokens = usage.prompt_tokens.saturating_add(of.prompt_tokens);
            usage.cached_tokens = usage.cached_tokens.saturating_add(of.cached_tokens);
        }
        Ok::<_, RouteError>(())
    };
    let waited = app.config.deadlines.request;
    let late = |_| RouteError::DeadlineExceeded { state: "for its vectors", waited };
    timeout_at(begin + waited, all).await.map_err(late)??;
    call.answered(usage, count);
    Ok(Vectors { list, usage, memory })
}

/// A prompt that is computed, and after which nothing comes.
fn job(name: &str, prompt: Prompt, how: &PoolingParams) -> Job {
    Job {
        name: name.to_owned(),
        prompt,
        sampling: Sampling::default(),
        stop: StopStrings::default(),
        stop_ids: Vec::new(),
        max_tokens: Some(0),
        n: 1,
        skip_special_tokens: true,
        reading: Reading::default(),
        session: how.session.clone(),
        priority: how.priority,
        account: Account::default(), // `Call::apply` knows this and the next three
        holder: Holder::default(),
        key: None,
        request_trace: Arc::default(),
        first_choice: 0,
        salt: how.salt.clone(),
        memory: None, // the caller's
        truncation: how.truncation,
        returns_ids: false,
        scores_prompt: false,
        pooling: Some(how.pooling),
    }
}

async fn vector(
    app: &Arc<App>,
    model: Arc<ServedModel>,
    job: Job,
) -> Result<(Vec<f32>, Usage), RouteError> {
    let mut answer = request::answer(app, model, job).await?;
    let mut found = None;
    while let Some(delta) = answer.next().await {
        found = found.or(delta?.pooled);
    }
    let bytes = found.ok_or_else(|| RouteError::mistake("a prompt ended without its vector"))?;
    let values = bytes.chunks_exact(4);
    let values = values.map(|value| f32::from_le_bytes(value.try_into().expect("four bytes")));
    Ok((values.collect(), answer.usage()))
}

/// Makes a vector's length 1. One without any direction stays as it is.
pub(super) fn normalise(vector: &mut [f32]) {
    let length = dot(vector, vector).sqrt();
    if length > 0.0 {
        #[expect(clippy::cast_possible_truncation, reason = "at most 1")]
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

/// The cosine of the angle between two vectors; 0 where one has no direction.
pub(super) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { (dot(a, b) / lengths).clamp(-1.0, 1.0) } else { 0.0 }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_gets_the_length_1_whatever_its_own_is() {
        for scale in [1e-30_f32, 1.0, 1e30] {
            let mut vector = [3.0 * scale, -4.0 * scale];
            normalise(&mut vector);
            assert!((vector[0] - 0.6).abs() < 1e-6 && (vector[1] + 0.8).abs() < 1e-6, "{vector:?}");
        }
        let mut nothing = [0.0, -0.0];
        normalise(&mut nothing);
        assert_eq!(nothing, [0.0, 0.0]);
    }

    #[test]
    fn a_cosine_says_how_alike_directions_are() {
        let close = |a: &[f32], b: &[f32], want: f64| (cosine(a, b) - want).abs() < 1e-12;
        assert!(close(&[2.0, 0.0], &[5.0, 0.0], 1.0));
        assert!(close(&[1.0, 0.0], &[0.0, 1e30], 0.0));
        assert!(close(&[1e-30, 0.0], &[-7.0, 0.0], -1.0));
        assert!(close(&[0.0, 0.0], &[1.0, 1.0], 0.0));
    }
}
