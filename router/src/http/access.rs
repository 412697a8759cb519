//! Who sends a request, and whether it may be a page in somebody's browser.
//!
//! Every request passes [`Access::admit`] before anything reads it. It must have one host and one length (`framing`). A key
//! that is known proves that its sender is no page of a stranger: pages have no keys of others. A request without one must
//! name this server in `Host`, so that no name that an attacker's DNS points here gets in (`host`), and if it changes
//! anything it must not come from a page of another origin (`origin`). What may be asked for is decided by
//! [`require_key`], [`require_operator`], and, for decisions, [`Caller::sees`].

mod cors;
mod framing;
mod host;
mod origin;

use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::app::App;
use crate::config::{AccessConfig, Tenant};
use crate::http::reply::reject::Reject;

pub(super) use cors::cors;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Caller {
    key: Key,
    peer: Entrance,
    /// There are keys of clients.
    api_keys: bool,
    /// There are keys of operators.
    admin_keys: bool,
}

/// What was sent as a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    None,
    Unknown,
    Client(Tenant),
    Operator,
}

impl Caller {
    /// Who is known by a key of clients.
    pub(super) fn tenant(&self) -> Option<Tenant> {
        match self.key {
            Key::Client(tenant) => Some(tenant),
            Key::None | Key::Unknown | Key::Operator => None,
        }
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
        let forwarded = || FORWARDED.iter().any(|name| headers.contains_key(name));
        self.key == Key::Operator || (trusted && !forwarded())
    }

    /// Whose decisions this request may see.
    ///
    /// # Errors
    /// `Unauthorized`.
    pub(super) fn sees(&self, headers: &HeaderMap) -> Result<Sees, Reject> {
        match self.key {
            _ if !self.api_keys || self.is_operator(headers) => Ok(Sees::All),
            Key::Client(tenant) => Ok(Sees::Only(tenant)),
            Key::None | Key::Operator => {
                Err(Reject::Unauthorized("this server asks for an API key"))
            }
            Key::Unknown => Err(Reject::Unauthorized("this API key is not known")),
        }
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
pub(super) struct Access(Arc<App>);

impl Access {
    pub(super) fn of(app: &Arc<App>) -> Self {
        Self(Arc::clone(app))
    }

    fn config(&self) -> &AccessConfig {
        &self.0.config.http.access
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
        let (api_keys, admin_keys) = (!config.api_keys.is_empty(), !config.admin_keys.is_empty());
        let key = if api_keys || admin_keys { self.key(request.headers())? } else { Key::None };
        if !matches!(key, Key::Client(_) | Key::Operator) {
            if !(api_keys && is_for_anybody(request)) {
                host::check(authority, &config.hosts)?;
            }
            if !matches!(*request.method(), Method::GET | Method::HEAD) {
                origin::check(request.headers(), authority, &config.origins)?;
            }
        }
        let peer = request.extensions().get().copied().unwrap_or_default();
        Ok(Caller { key, peer, api_keys, admin_keys })
    }

    /// Clients of OpenAI's API send `Authorization`, those of Anthropic's `X-Api-Key`, and some both, of which one may be
    /// meant for another server.
    fn key(&self, headers: &HeaderMap) -> Result<Key, Reject> {
        let bearer_twice = "Authorization came more than once";
        let authorization = once(headers, header::AUTHORIZATION, bearer_twice)?;
        let api_key = once(headers, API_KEY, "X-Api-Key came more than once")?;
        let key = authorization.map_or(Key::None, |value| self.known(bearer(value)));
        Ok(match (key, api_key) {
            (Key::None | Key::Unknown, Some(value)) => {
                self.known(Some(value.as_bytes().trim_ascii()))
            }
            (key, _) => key,
        })
    }

    fn known(&self, key: Option<&[u8]>) -> Key {
        let Some(key) = key else { return Key::Unknown };
        let config = self.config();
        match (config.admin_keys.find(key), config.api_keys.find(key)) {
            (Some(_), _) => Key::Operator,
            (None, Some(tenant)) => Key::Client(tenant),
            (None, None) => Key::Unknown,
        }
    }
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

/// What balancers, Prometheus and readers of the documentation ask for, without a key and by whatever name they know this server. Where clients have keys,
/// it is there for everybody who reaches this port.
fn is_for_anybody(request: &Request) -> bool {
    let path = matches!(
        request.uri().path(),
        "/health"
            | "/ready"
            | "/metrics"
            | "/version"
            | "/openapi.json"
            | "/docs"
            | "/docs/page.js"
            | "/docs/page.css"
    );
    path && matches!(*request.method(), Method::GET | Method::HEAD)
}

/// The key in an `Authorization` header.
fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Who sent a request that was admitted.
pub(super) fn caller(request: &Request) -> Caller {
    *request.extensions().get::<Caller>().expect("`observe` admits whatever gets further")
}

/// Lets clients pass: everybody, or who has one of the keys.
pub(super) async fn require_key(request: Request, next: Next) -> Response {
    let caller = caller(&request);
    let refused = match caller.key {
        Key::Client(_) => None,
        _ if !caller.api_keys => None,
        Key::None => Some("this server asks for an API key"),
        Key::Operator => Some("a key of operators is no API key"),
        Key::Unknown => Some("this API key is not known"),
    };
    match refused {
        None => next.run(request).await,
        Some(why) => Reject::Unauthorized(why).into_response(),
    }
}

/// Lets operators pass. What they change, they change by a request that no page can send unasked.
pub(super) async fn require_operator(request: Request, next: Next) -> Response {
    let caller = caller(&request);
    if !caller.is_operator(request.headers()) {
        let reject = match caller.key {
            Key::None | Key::Unknown if caller.admin_keys => {
                Reject::Unauthorized("this asks for a key of operators")
            }
            Key::None | Key::Unknown | Key::Client(_) | Key::Operator => Reject::NotOperator,
        };
        return reject.into_response();
    }
    let changes = !matches!(*request.method(), Method::GET | Method::HEAD);
    if changes && !request.headers().contains_key(header::CONTENT_TYPE) {
        return Reject::MediaType { got: "nothing".into() }.into_response();
    }
    next.run(request).await
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
