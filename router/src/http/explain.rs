//! Decisions for people: in a header, in a comment at the end of a stream, and at `/decisions/ID`.

mod words;

use std::fmt::Write as _;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue};
use serde::Serialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::core::candidate::{Candidate, Exclusion, GroupRank};
use crate::core::decision::{Decision, LeftOut, WorkerPair};
use crate::core::estimate::Estimate;
use crate::core::frame::Role;
use crate::core::policy::PolicyName;
use crate::decisions::{REMEMBERED, Remembered};
use crate::http::access::{Sees, caller};
use crate::http::parse::fields::clip;
use crate::http::reply::reject::Reject;

/// The decision itself, where it is short.
pub(super) const DECISION: HeaderName = HeaderName::from_static("x-headrace-decision");
/// Where it is to be found, otherwise.
pub(super) const LOCATION: HeaderName = HeaderName::from_static("x-headrace-decision-location");
/// Proxies refuse answers with longer headers; 4 to 8 KiB for all of them together is common.
const MAX_HEADER: usize = 4 << 10;

/// A decision with the names and figures that say why.
#[derive(Debug, Serialize)]
struct Explanation<'a> {
    request: &'a str,
    at_ms: f64,
    policy: PolicyName,
    prompt_tokens: u32,
    max_tokens: u32,
    /// As long as the answer is expected to be.
    output_tokens: f64,
    deadline_ms: Option<f64>,
    /// In a split, the one that decodes.
    winner: Option<&'a str>,
    /// Computes the prompt, in a split.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill: Option<&'a str>,
    candidates: Vec<CandidateView<'a>>,
    /// Candidates that are not shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<LeftOut>,
    /// The pair that was taken, or the best one that was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pair: Option<PairView<'a>>,
    shadow: Option<ShadowView<'a>>,
}

#[derive(Debug, Serialize)]
struct CandidateView<'a> {
    worker: &'a str,
    role: Role,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<&'a GroupRank>,
    cached_tokens: u32,
    #[serde(flatten)]
    parts: Parts,
    excluded: Option<Exclusion>,
}

#[derive(Debug, Serialize)]
struct PairView<'a> {
    prefill: &'a str,
    decode: &'a str,
    #[serde(flatten)]
    parts: Parts,
}

/// Of an estimate, to the microsecond.
#[derive(Debug, Serialize)]
struct Parts {
    queue_ms: f64,
    prefill_ms: f64,
    transfer_ms: f64,
    decode_ms: f64,
    interference_ms: f64,
    saturation_ms: f64,
    total_ms: f64,
}

#[derive(Debug, Serialize)]
struct ShadowView<'a> {
    policy: PolicyName,
    winner: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill: Option<&'a str>,
    regret_ms: f64,
}

impl<'a> Explanation<'a> {
    fn of(decision: &'a Decision) -> Self {
        let name = |id| {
            let named = decision.candidates.iter().find(|candidate| candidate.id == id);
            named.map(|candidate| &*candidate.name)
        };
        let candidates = decision.candidates.iter().zip(&decision.estimates);
        Self {
            request: &decision.request,
            at_ms: rounded(decision.at_ms),
            policy: decision.chooser.policy.name(),
            prompt_tokens: decision.ask.prompt_tokens,
            max_tokens: decision.ask.max_tokens,
            output_tokens: rounded(decision.ask.output_tokens),
            deadline_ms: decision.ask.deadline_ms.map(rounded),
            winner: decision.winner.and_then(name),
            prefill: decision.prefill.and_then(name),
            pair: decision.pair.as_ref().and_then(|WorkerPair { prefill, decode, estimate }| {
                let parts = Parts::of(estimate);
                Some(PairView { prefill: name(*prefill)?, decode: name(*decode)?, parts })
            }),
            candidates: candidates.map(|(one, estimate)| candidate(one, estimate)).collect(),
            left_out: decision
                .left_out
                .map(|rest| LeftOut { least_ms: rounded(rest.least_ms), ..rest }),
            shadow: decision.shadow.as_ref().and_then(|shadow| {
                let (policy, winner) = (shadow.chooser.policy.name(), name(shadow.winner)?);
                let prefill = shadow.prefill.and_then(name);
                Some(ShadowView { policy, winner, prefill, regret_ms: rounded(shadow.regret_ms) })
            }),
        }
    }
}

fn candidate<'a>(candidate: &'a Candidate, estimate: &Estimate) -> CandidateView<'a> {
    CandidateView {
        worker: &candidate.name,
        role: candidate.role,
        group: candidate.group.as_ref(),
        cached_tokens: candidate.cached_tokens,
        parts: Parts::of(estimate),
        excluded: candidate.excluded,
    }
}

impl Parts {
    fn of(estimate: &Estimate) -> Self {
        Self {
            queue_ms: rounded(estimate.queue_ms),
            prefill_ms: rounded(estimate.prefill_ms),
            transfer_ms: rounded(estimate.transfer_ms),
            decode_ms: rounded(estimate.decode_ms),
            interference_ms: rounded(estimate.interference_ms),
            saturation_ms: rounded(estimate.saturation_ms),
            total_ms: rounded(estimate.total_ms()),
        }
    }
}

/// To the microsecond.
fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// One decision as an object, several as an array; ASCII only.
pub(super) fn ascii_json(decisions: &[Arc<Decision>]) -> String {
    let all: Vec<Explanation<'_>> = decisions.iter().map(|one| Explanation::of(one)).collect();
    let json = match &*all {
        [one] => serde_json::to_string(one),
        all => serde_json::to_string(all),
    };
    let json = json.expect("plain data");
    if json.is_ascii() {
        return json;
    }
    let mut ascii = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            ascii.push(c);
        } else {
            // outside strings JSON is ASCII, and in strings this means the same
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(ascii, "\\u{unit:04x}").expect("writing to memory cannot fail");
            }
        }
    }
    ascii
}

/// The same for a header; `None` if it is too long for one.
pub(super) fn header(decisions: &[Arc<Decision>]) -> Option<HeaderValue> {
    let json = ascii_json(decisions);
    (json.len() <= MAX_HEADER).then(|| HeaderValue::try_from(json).ok())?
}

/// Where the decisions about a request are.
pub(super) fn location(request_id: &str) -> HeaderValue {
    let mut path = "/decisions/".to_owned();
    for byte in request_id.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            path.push(char::from(byte));
        } else {
            write!(path, "%{byte:02X}").expect("writing to memory cannot fail");
        }
    }
    HeaderValue::try_from(path).expect("ASCII")
}

/// All decisions about a request that are remembered, the oldest first: as explanations, with what happened, and as they
/// can be replayed; and what each word of them means. Who
/// has a key sees those about its tenant's requests; an id that another tenant chose, too, is nothing to it.
/// Each decision names its tenant: to operators, requests of several tenants may have one id.
pub(super) async fn decisions(
    State(app): State<Arc<App>>,
    Path(request): Path<String>,
    asking: Request,
) -> Result<Json<Value>, Reject> {
    let account = match caller(&asking).sees(asking.headers())? {
        Sees::All => None,
        Sees::Only(tenant) => Some(tenant.id()),
    };
    let decisions = app.decisions.about(&request, account);
    if decisions.is_empty() {
        return Err(Reject::NoDecision { request: clip(&request), remembered: REMEMBERED });
    }
    let described: Vec<Value> = decisions.iter().map(describe).collect();
    Ok(Json(json!({ "request": request, "decisions": described, "words": words::all() })))
}

fn describe(remembered: &Remembered) -> Value {
    let Remembered { tenant, decision, actual } = remembered;
    let mut described = json!(Explanation::of(decision));
    described["tenant"] = json!(tenant.name.as_deref());
    described["actual"] = json!(actual.report());
    // with candidates left out it cannot be made again
    described["inputs"] = json!(decision.left_out.is_none().then_some(decision));
    described
}

#[cfg(test)]
mod tests;
