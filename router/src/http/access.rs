//! Who sends a request, and whether it may be a page in somebody's browser.
//!
//! Every request passes [`Access::admit`] before anything reads it. It must have one host and one length (`framing`). A key
//! that is known proves that its sender is no page of a stranger: pages have no keys of others. A request without one must
//! name this server in `Host`, so that no name that an attacker's DNS points here gets in (`host`), and if it changes
//! anything it must not come from a page of another origin (`origin`). What may be asked for is decided by
//! [`require_key`], [`require_operator`], and, for decisions, [`Caller::sees`].

mod around;
mod cors;
mod framing;
mod host;
mod limits;
mod models;
mod origin;

use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::response::{IntoResponse as _, Response};

use crate::app::App;
use crate::config::{AccessConfig, Tenant};
use crate::http::reply::reject::Reject;
use crate::limits::key_ring::{ClientKey, KeysNow, Standing};

pub(super) use around::{Around, Passage};
pub(super) use cors::Cors;
pub(super) use models::AllowedModels;

/// Headers that proxies add: such a request comes from somebody else than from whom its connection comes.
const FORWARDED: [HeaderName; 4] = [
    HeaderName::from_static("forwarded"),
    HeaderName::from_static("x-forwarded-for"),
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("via"),
];

/// Where Anthropic's clients send their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// What a connection tells about its other end; whoever accepts connections leaves it on their requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Entrance {
    /// The connection tells nothing about its other end.
    #[default]
    Anybody,
    /// A process of this machine.
    Local,
    /// Whoever could open an address that only operators can open.
    Operator,
}

impl Entrance {
    /// A client with this address, at the port of the clients.
    pub(crate) fn of(client: std::net::IpAddr) -> Self {
        if client.to_canonical().is_loopback() { Self::Local } else { Self::Anybody }
    }
}

/// Who sent a request, as far as it is proved.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    /// What was sent as a key.
    key: Option<Standing>,
    peer: Entrance,
    /// There are keys of clients.
    api_keys: bool,
    /// There are keys of operators.
    admin_keys: bool,
    /// It came in where operators are served.
    among_operators: bool,
}

impl Caller {
    /// The key by which a client is known.
    pub(super) fn client(&self) -> Option<&Arc<ClientKey>> {
        match &self.key {
            Some(Standing::Client(key)) => Some(key),
            _ => None,
        }
    }

    /// Who is known by a key of clients.
    pub(super) fn tenant(&self) -> Option<Tenant> {
        self.client().map(|key| key.tenant())
    }

    /// Whose alone is what is cached of its prompts; `None` if all share it.
    pub(super) fn cache_of(&self, app: &App) -> Option<Tenant> {
        self.tenant().filter(|_| !app.config.http.access.shared_cache)
    }

    fn is_operator(&self, headers: &HeaderMap) -> bool {
        let trusted = match self.peer {
            Entrance::Operator => true,
            Entrance::Local => !self.api_keys && !self.admin_keys,
            Entrance::Anybody => false,
        };
        let proved = matches!(self.key, Some(Standing::Operator));
        self.among_operators && (proved || (trusted && !is_forwarded(headers)))
    }

    /// True if a process of this machine sent it for itself, as far as that can be told.
    fn is_near(&self, headers: &HeaderMap) -> bool {
        self.peer == Entrance::Local && !is_forwarded(headers)
    }

    fn may_scrape(&self, headers: &HeaderMap) -> bool {
        let scraper = matches!(self.key, Some(Standing::Scraper));
        scraper || self.is_operator(headers) || self.is_near(headers)
    }

    /// The dashboard is for it; or it may be, once somebody has typed a key of operators there.
    pub(super) fn may_open_dashboard(&self, headers: &HeaderMap) -> bool {
        self.admin_keys || self.is_operator(headers)
    }

    /// Whose decisions this request may see.
    ///
    /// # Errors
    /// `Unauthorized`, or `NotOperator` where nobody is known.
    pub(super) fn sees(&self, headers: &HeaderMap) -> Result<Sees, Reject> {
        match &self.key {
            _ if self.is_operator(headers) => Ok(Sees::All),
            Some(Standing::Client(key)) => Ok(Sees::Only(key.tenant())),
            _ if !self.api_keys && self.is_near(headers) => Ok(Sees::All),
            _ if !self.api_keys => Err(Reject::NotOperator),
            other => Err(Reject::Unauthorized(not_a_client(other.as_ref()))),
        }
    }
}

/// True if a proxy says that it sends this for somebody else.
fn is_forwarded(headers: &HeaderMap) -> bool {
    FORWARDED.iter().any(|name| headers.contains_key(name))
}

/// Why somebody is no client with a key.
fn not_a_client(key: Option<&Standing>) -> &'static str {
    match key {
        Some(Standing::Operator | Standing::Scraper) => "a key of operators is no API key",
        Some(Standing::Expired) => "this API key has expired",
        Some(Standing::Unknown | Standing::Client(_)) => "this API key is not known",
        None => "this server asks for an API key",
    }
}

/// Whose decisions somebody may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sees {
    All,
    Only(Tenant),
}

/// What requests are checked against.
#[derive(Debug, Clone)]
pub(super) struct Access {
    app: Arc<App>,
    among_operators: bool,
}

impl Access {
    /// `among_operators`: operators are served there.
    pub(super) fn of(app: &Arc<App>, among_operators: bool) -> Self {
        Self { app: Arc::clone(app), among_operators }
    }

    fn config(&self) -> &AccessConfig {
        &self.app.config.http.access
    }

    /// Turns away what no honest client sends, and notes who asks.
    pub(super) fn admit(&self, request: &mut Request) -> Result<(), Reject> {
        let caller = self.caller(request)?;
        request.extensions_mut().insert(caller);
        Ok(())
    }

    fn caller(&self, request: &Request) -> Result<Caller, Reject> {
        framing::check(request.version(), request.headers())?;
        let authority = host::named(request)?;
        let config = self.config();
        let keys = self.app.keys.now();
        let (api_keys, admin_keys) = (keys.are_asked_of_clients(), keys.are_asked_of_operators());
        let asked = api_keys || admin_keys;
        let key = if asked { key(&keys, request.headers())? } else { None };
        if matches!(key, None | Some(Standing::Expired | Standing::Unknown)) {
            if !(api_keys && is_for_anybody(request, config)) {
                host::check(authority, &config.hosts)?;
            }
            if changes(request) || request.uri().path() == DASHBOARD_EVENTS {
                origin::check(request.headers(), authority, &self.app.origins())?;
            }
        }
        let peer = request.extensions().get().copied().unwrap_or_default();
        Ok(Caller { key, peer, api_keys, admin_keys, among_operators: self.among_operators })
    }
}

/// A stream that pages of other origins may not open: they could not read it, but would take the places of those who may.
const DASHBOARD_EVENTS: &str = "/dashboard/events";

fn changes(request: &Request) -> bool {
    !matches!(*request.method(), Method::GET | Method::HEAD)
}

/// Clients of OpenAI's API send `Authorization`, those of Anthropic's `X-Api-Key`, and some both, of which one may be
/// meant for another server.
fn key(keys: &KeysNow, headers: &HeaderMap) -> Result<Option<Standing>, Reject> {
    let bearer_twice = "Authorization came more than once";
    let authorization = once(headers, header::AUTHORIZATION, bearer_twice)?;
    let api_key = once(headers, API_KEY, "X-Api-Key came more than once")?;
    let known = |key: Option<&[u8]>| key.map_or(Standing::Unknown, |key| keys.of_sender(key));
    let key = authorization.map(|value| known(bearer(value)));
    Ok(match (key, api_key) {
        (None | Some(Standing::Unknown), Some(value)) => {
            Some(known(Some(value.as_bytes().trim_ascii())))
        }
        (key, _) => key,
    })
}

/// A header that may come once.
fn once<'a>(
    headers: &'a HeaderMap,
    name: HeaderName,
    twice: &'static str,
) -> Result<Option<&'a HeaderValue>, Reject> {
    let mut sent = headers.get_all(name).iter();
    let first = sent.next();
    if sent.next().is_some() {
        return Err(Reject::Framing(twice));
    }
    Ok(first)
}

/// What balancers and readers of the documentation ask for, without a key and by whatever name they know this server. Where
/// clients have keys, it is there for everybody who reaches this port.
fn is_for_anybody(request: &Request, config: &AccessConfig) -> bool {
    let path = request.uri().path();
    let path = (path == "/metrics" && config.public_metrics)
        || matches!(
            path,
            "/health"
                | "/healthz"
                | "/livez"
                | "/ping"
                | "/ready"
                | "/readyz"
                | "/version"
                | "/openapi.json"
                | "/docs"
                | "/docs/page.js"
                | "/docs/page.css"
                | "/"
        )
        || (path.starts_with("/dashboard/") && path != DASHBOARD_EVENTS);
    path && matches!(*request.method(), Method::GET | Method::HEAD)
}

/// The key in an `Authorization` header.
fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Who sent a request that was admitted.
pub(super) fn caller(request: &Request) -> Caller {
    let caller = request.extensions().get::<Caller>();
    caller.expect("`observe` admits whatever gets further").clone()
}

/// Lets clients pass: everybody, or who has one of the keys, as often as the key may.
pub(super) fn require_key(request: &mut Request) -> Passage {
    let caller = caller(request);
    let Some(key) = caller.client() else {
        if caller.api_keys {
            let why = not_a_client(caller.key.as_ref());
            return Passage::Answered(Reject::Unauthorized(why).into_response());
        }
        return Passage::passes();
    };
    let key = Arc::clone(key);
    let is_work = !matches!(*request.method(), Method::GET | Method::HEAD | Method::DELETE);
    let admitted = if is_work { key.admit() } else { Ok(()) };
    let told = move |mut response: Response| {
        limits::tell(&key, response.headers_mut());
        response
    };
    match admitted {
        Ok(()) => Passage::changing(told),
        Err(error) => Passage::Answered(told(Reject::from(error).into_response())),
    }
}

/// Lets those pass who may read `/metrics`.
pub(super) fn require_scraper(app: &App, request: &mut Request) -> Passage {
    let caller = caller(request);
    if app.config.http.access.public_metrics || caller.may_scrape(request.headers()) {
        return Passage::passes();
    }
    let reject = match caller.key {
        Some(Standing::Expired) => Reject::Unauthorized("this key has expired"),
        None | Some(Standing::Unknown) if caller.admin_keys => {
            Reject::Unauthorized("metrics are for a key of operators, or one with only=metrics")
        }
        _ => Reject::NotScraper,
    };
    Passage::Answered(reject.into_response())
}

/// Lets operators pass. What they change, they change by a request that no page can send unasked.
pub(super) fn require_operator(request: &mut Request) -> Passage {
    let caller = caller(request);
    if !caller.is_operator(request.headers()) {
        let reject = match caller.key {
            Some(Standing::Expired) => Reject::Unauthorized("this key has expired"),
            None | Some(Standing::Unknown) if caller.admin_keys => {
                Reject::Unauthorized("this asks for a key of operators")
            }
            _ => Reject::NotOperator,
        };
        return Passage::Answered(reject.into_response());
    }
    if changes(request) && !request.headers().contains_key(header::CONTENT_TYPE) {
        return Passage::Answered(Reject::MediaType { got: "nothing".into() }.into_response());
    }
    Passage::passes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_this_machine_in_every_notation() {
        for (address, entrance) in [
            ("127.0.0.1", Entrance::Local),
            ("127.9.9.9", Entrance::Local),
            ("::1", Entrance::Local),
            ("::ffff:127.0.0.1", Entrance::Local),
            ("10.0.0.1", Entrance::Anybody),
            ("::ffff:10.0.0.1", Entrance::Anybody),
            ("2001:db8::1", Entrance::Anybody),
        ] {
            assert_eq!(Entrance::of(address.parse().unwrap()), entrance, "{address}");
        }
    }
}
