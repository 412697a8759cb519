//! What the headers of a generation ask for, and what the headers of its answer say.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse as _, Response};
use tokio::time::Instant;

use crate::app::App;
use crate::config::Tenant;
use crate::error::RouteError;
use crate::http::access::caller;
use crate::http::explain;
use crate::http::parse::headers::{bad_header, request_id, session, single, span_of};
use crate::http::parse::ignored::IgnoredFields;
use crate::http::parse::nvext::Annotations;
use crate::http::reply::reject::Reject;
use crate::limits::key_ring::ClientKey;
use crate::limits::shares::Account;
use crate::limits::shares::{Holder, address_number};
use crate::metrics::Metrics;
use crate::net::Peer;
use crate::request::{Ends, Job, RequestTrace, Slo, Stages, Usage};
use crate::response_store::OwnerId;

const DEADLINE: &str = "X-Headrace-TTFT-Deadline-Ms";
const EXPLAIN: &str = "X-Headrace-Explain";
const TENANT: &str = "X-Headrace-Tenant";
/// Longest wish for a first token: a day.
const MAX_DEADLINE_MS: u64 = 86_400_000;
/// Longest name of a tenant, in bytes.
const MAX_TENANT: usize = 128;

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Fields of the body that changed nothing.
const IGNORED: HeaderName = HeaderName::from_static("x-headrace-ignored");
const WORKER: HeaderName = HeaderName::from_static("x-headrace-worker");
/// The worker that computes the prompt, where that is another one.
const PREFILL_WORKER: HeaderName = HeaderName::from_static("x-headrace-prefill-worker");

/// Left on a response whose request tells the log of its end itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct EndTold;

/// One request for a generation, from its headers to those of its answer.
#[derive(Debug)]
pub(super) struct Call {
    request_trace: Arc<RequestTrace>,
    metrics: Arc<Metrics>,
    session: Option<String>,
    account: Account,
    /// Whose alone is what is cached of its prompt.
    cache_of: Option<Tenant>,
    holder: Holder,
    key: Option<Arc<ClientKey>>,
    explain: bool,
    /// What its body says and nobody uses.
    pub(super) ignored: IgnoredFields,
}

impl Call {
    /// Reads the headers. The request counts from now on.
    ///
    /// # Errors
    /// `BadRequest` names the header that is wrong.
    pub(super) fn of(app: &App, request: &Request) -> Result<Self, RouteError> {
        let headers = request.headers();
        let routing = &app.config.routing;
        let first_token = deadline(headers)?.unwrap_or(routing.ttft_deadline);
        let slo = first_token.map(|first_token| Slo {
            first_token,
            tpot_ms: routing.slo_tpot_ms,
            metrics: Arc::clone(&app.metrics),
        });
        let (caller, explain) = (caller(request), wants_explanation(headers)?);
        let key = caller.client();
        let account = account(headers, key)?;
        Ok(Self {
            holder: holder(request, account.id, caller.tenant()),
            key: key.map(Arc::clone),
            explain,
            session: session(headers),
            account,
            ignored: IgnoredFields::new(app.config.http.unknown_pass),
            cache_of: caller.cache_of(app),
            request_trace: RequestTrace::logged(
                request_id(request),
                slo,
                explain,
                Ends {
                    log: Arc::clone(&app.request_log),
                    metrics: Arc::clone(&app.metrics),
                    span: span_of(request),
                },
            ),
            metrics: Arc::clone(&app.metrics),
        })
    }

    /// Says whose job it is. `first_choice`: number of its choice 0 among all choices of the request.
    pub(super) fn apply(&self, job: &mut Job, first_choice: u32) {
        job.session = self.session.clone().or(job.session.take());
        job.account = self.account.clone();
        if let Some(tenant) = self.cache_of {
            job.salt = tenant.salt(&job.salt);
        }
        job.holder = self.holder;
        job.key.clone_from(&self.key);
        job.request_trace = Arc::clone(&self.request_trace);
        job.first_choice = first_choice;
    }

    /// Whose turns and places it takes.
    pub(super) fn holder(&self) -> Holder {
        self.holder
    }

    /// Annotations come with streams of chats and completions alone.
    pub(super) fn leaves_out(&self, annotations: Annotations) {
        if annotations.any() {
            self.ignored.note("nvext.annotations".to_owned());
        }
    }

    /// By which it is known.
    pub(super) fn request_id(&self) -> &str {
        self.request_trace.request_id()
    }

    /// Whose is what is stored of its answer.
    pub(super) fn owner(&self) -> OwnerId {
        self.account.id
    }

    /// Takes note that all choices came to their end.
    pub(super) fn answered(&self, usage: Usage, choices: usize) {
        observe_tpot(&self.metrics, self.request_trace.answered(usage, choices));
    }

    /// What a stream needs to say at its end.
    pub(super) fn ending(&self, choices: usize) -> Ending {
        // what fits a header is said there
        let explain = self.explain && explain::header(&self.request_trace.decisions()).is_none();
        let (request_trace, metrics) = (Arc::clone(&self.request_trace), Arc::clone(&self.metrics));
        Ending { request_trace, metrics, choices, explain }
    }

    /// The answer with its headers.
    pub(super) fn finish(&self, answer: Result<Response, Reject>) -> Response {
        let mut response = answer.unwrap_or_else(|reject| {
            if let Reject::Route(error) = &reject {
                self.request_trace.failed(error);
            } else {
                let (code, why) = reject.code_and_message();
                self.request_trace.refused(code.unwrap_or("bad_request"), why);
            }
            reject.into_response()
        });
        self.request_trace.replied(response.status().as_u16());
        response.extensions_mut().insert(EndTold);
        let headers = response.headers_mut();
        if let Some(value) = server_timing(&self.request_trace.stages()) {
            headers.insert(SERVER_TIMING, value);
        }
        if let Some(names) = self.ignored.header() {
            headers.insert(IGNORED, names);
            self.metrics.http.ignored_parameters.inc_by(self.ignored.len());
        }
        if let Some(worker) = self.request_trace.worker() {
            headers.insert(WORKER, printable(&worker));
        }
        if let Some(worker) = self.request_trace.prefill_worker() {
            headers.insert(PREFILL_WORKER, printable(&worker));
        }
        let decisions = self.request_trace.decisions();
        if self.explain && !decisions.is_empty() {
            match explain::header(&decisions) {
                Some(value) => headers.insert(explain::DECISION, value),
                None => headers
                    .insert(explain::LOCATION, explain::location(self.request_trace.request_id())),
            };
        }
        response
    }
}

/// Whose stored responses a request may see.
///
/// # Errors
/// `BadRequest` names the header that is wrong.
pub(super) fn owner_of(request: &Request) -> Result<OwnerId, RouteError> {
    Ok(account(request.headers(), caller(request).client())?.id)
}

fn observe_tpot(metrics: &Metrics, tpot: Option<Duration>) {
    if let Some(tpot) = tpot {
        metrics.recent.tpot.observe(Instant::now(), tpot);
    }
}

/// What is to be done and said when a stream ends.
#[derive(Debug)]
pub(super) struct Ending {
    request_trace: Arc<RequestTrace>,
    metrics: Arc<Metrics>,
    choices: usize,
    explain: bool,
}

impl Ending {
    /// It came to its end.
    pub(super) fn answered(&self, usage: Usage) {
        observe_tpot(&self.metrics, self.request_trace.answered(usage, self.choices));
    }

    /// It broke off.
    pub(super) fn failed(&self, error: &RouteError) {
        self.request_trace.failed(error);
        if !matches!(error, RouteError::ClientGone) {
            self.metrics.requests.streams_broken.inc(error.kind());
        }
    }

    /// The last comment of the stream, where one was asked for.
    pub(super) fn comment(&self) -> Option<String> {
        let decisions = || explain::ascii_json(&self.request_trace.decisions());
        self.explain.then(|| format!("headrace-decision {}", decisions()))
    }
}

/// `Some(None)`: this request wants no deadline.
fn deadline(headers: &HeaderMap) -> Result<Option<Option<Duration>>, RouteError> {
    let Some(text) = single(headers, DEADLINE)? else { return Ok(None) };
    let ms = text.parse().ok().filter(|ms| *ms <= MAX_DEADLINE_MS).ok_or_else(|| {
        let problem =
            format!("must be a whole number of ms up to {MAX_DEADLINE_MS}, or 0 for no deadline");
        bad_header(DEADLINE, &problem)
    })?;
    Ok(Some((ms > 0).then(|| Duration::from_millis(ms))))
}

fn wants_explanation(headers: &HeaderMap) -> Result<bool, RouteError> {
    match single(headers, EXPLAIN)? {
        None | Some("0" | "false") => Ok(false),
        Some("1" | "true") => Ok(true),
        Some(_) => Err(bad_header(EXPLAIN, "must be 1 or 0")),
    }
}

/// Whose share of the service it takes: who has a key is known by it, and others by what they say.
fn account(headers: &HeaderMap, key: Option<&Arc<ClientKey>>) -> Result<Account, RouteError> {
    if let Some(key) = key {
        let id = key.tenant().id();
        let name = key.tenant_name().unwrap_or_else(|| format!("{id:016x}").into());
        return Ok(Account { id, name: Some(name) });
    }
    let Some(name) = single(headers, TENANT)? else { return Ok(Account::default()) };
    if name.is_empty() || name.len() > MAX_TENANT {
        let problem = format!("must be 1 to {MAX_TENANT} bytes long");
        return Err(bad_header(TENANT, &problem));
    }
    let digest = blake3::hash(name.as_bytes());
    let id = u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("8 of 32 bytes"));
    Ok(Account { id, name: Some(name.into()) })
}

/// Whose share of the places it takes. Without a key, its address counts as well, and without a tenant it counts as one.
fn holder(request: &Request, account: u64, tenant: Option<Tenant>) -> Holder {
    let Some(peer) = request.extensions().get::<Peer>() else {
        return Holder { tenant: account, ..Holder::default() };
    };
    let connection = peer.connection;
    if tenant.is_some() {
        return Holder { tenant: account, address: 0, connection };
    }
    let address = address_number(peer.address);
    Holder { tenant: if account == 0 { address } else { account }, address, connection }
}

/// The stages that are known, as W3C Server Timing has it.
fn server_timing(stages: &Stages) -> Option<HeaderValue> {
    let known = [
        ("tokenise", stages.tokenise),
        ("queue", stages.queue),
        ("route", stages.route),
        ("prefill", stages.prefill),
        ("first-token", stages.first_token),
    ];
    let known = known
        .into_iter()
        .filter_map(|(name, took)| Some(format!("{name};dur={:.3}", took?.as_secs_f64() * 1e3)));
    let text = known.collect::<Vec<_>>().join(", ");
    (!text.is_empty()).then(|| HeaderValue::try_from(text).expect("names and numbers"))
}

/// A name as a header can say it.
fn printable(name: &str) -> HeaderValue {
    let text: String =
        name.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect();
    HeaderValue::try_from(text).expect("printable ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn param<T: std::fmt::Debug>(result: Result<T, RouteError>) -> String {
        match result {
            Err(RouteError::BadRequest { param: Some(param), message }) => {
                assert!(message.contains(&param), "{message}");
                param
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_deadline_is_whole_ms_and_0_is_none() {
        let read = |value| deadline(&headers(&[("x-headrace-ttft-deadline-ms", value)]));
        assert_eq!(deadline(&HeaderMap::new()).unwrap(), None);
        assert_eq!(read("0").unwrap(), Some(None));
        assert_eq!(read(" 250 ").unwrap(), Some(Some(Duration::from_millis(250))));
        for wrong in ["", "-1", "1.5", "1e3", "soon", "86400001", "99999999999999999999"] {
            assert_eq!(param(read(wrong)), DEADLINE, "{wrong}");
        }
        let name = "x-headrace-ttft-deadline-ms";
        assert_eq!(param(deadline(&headers(&[(name, "1"), (name, "2")]))), DEADLINE);
    }

    #[test]
    fn explaining_is_on_or_off() {
        let read = |value| wants_explanation(&headers(&[("x-headrace-explain", value)]));
        assert!(read("1").unwrap() && read("true").unwrap() && !read("0").unwrap());
        assert!(!wants_explanation(&HeaderMap::new()).unwrap());
        assert_eq!(param(read("yes")), EXPLAIN);
    }

    #[test]
    fn who_has_no_key_is_what_he_says() {
        let read = |name| account(&headers(&[("x-headrace-tenant", name)]), None);
        let nobody = account(&HeaderMap::new(), None).unwrap();
        assert_eq!((nobody.id, nobody.name), (0, None));
        let (a, b) = (read("a").unwrap(), read("b").unwrap());
        assert!(a.id != b.id && a.id != 0);
        assert_eq!(a.name.as_deref(), Some("a"));
        let long = "0123456789012345678901234567890123456789012345678901234567890123456789\
            01234567890123456789012345678901234567890123456789012345678";
        for wrong in ["", long] {
            assert_eq!(param(read(wrong)), TENANT);
        }
    }

    #[test]
    fn stages_are_said_as_far_as_they_are_known() {
        assert_eq!(server_timing(&Stages::default()), None);
        let ms = |n| Some(Duration::from_micros(n));
        let stages = Stages { tokenise: ms(1_500), queue: ms(0), ..Stages::default() };
        assert_eq!(server_timing(&stages).unwrap(), "tokenise;dur=1.500, queue;dur=0.000");
    }

    #[test]
    fn any_name_of_a_worker_can_be_said() {
        assert_eq!(printable("w-1 a"), "w-1 a");
        assert_eq!(printable("w\u{e9}\n\u{1f600}"), "w???");
    }
}
