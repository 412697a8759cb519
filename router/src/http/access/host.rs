//! Whom a request is for: by `Host`, `:authority`, or the target itself; and whether that is us.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::extract::Request;
use axum::http::{header, uri::Authority};

use crate::config::Names;
use crate::http::parse::fields::clip;
use crate::http::reply::reject::Reject;

/// The host and port that a request names, after a check that it names one. HTTP/1.0 need not name any.
pub(super) fn named(request: &Request) -> Result<Option<&str>, Reject> {
    let target = request.uri().authority().map(Authority::as_str);
    let Some(host) = request.headers().get(header::HOST) else { return Ok(target) };
    let host = host.to_str().map_err(|_| Reject::Framing("Host is not plain text"))?.trim_ascii();
    if split(host).is_none() {
        return Err(Reject::Framing("Host is no name and no address of a host"));
    }
    match target {
        Some(target) if !target.eq_ignore_ascii_case(host) => {
            Err(Reject::Framing("Host and the target of the request differ"))
        }
        _ => Ok(Some(host)),
    }
}

/// Refuses names that are none of ours. An address in their place is always ours: only names can be made to point here
/// by who does not own this server.
pub(super) fn check(authority: Option<&str>, known: &Names) -> Result<(), Reject> {
    let Some(authority) = authority else { return Ok(()) };
    let name = split(authority);
    if name.is_some_and(|name| is_address(name) || is_localhost(name) || known.contain(name)) {
        return Ok(());
    }
    Err(Reject::UnknownHost { host: clip(authority) })
}

/// The host without its port and without the dot that may end it; `None` if it is neither name nor address.
fn split(authority: &str) -> Option<&str> {
    let (host, port) = if authority.starts_with('[') {
        let (host, rest) = authority.split_at(authority.find(']')? + 1);
        (host, if rest.is_empty() { "" } else { rest.strip_prefix(':')? })
    } else {
        authority.split_once(':').unwrap_or((authority, ""))
    };
    let name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let good = host.starts_with('[') || host.bytes().all(name);
    let host = host.strip_suffix('.').unwrap_or(host);
    let port = port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    (good && port && !host.is_empty()).then_some(host)
}

fn is_address(name: &str) -> bool {
    match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(v6) => v6.parse::<Ipv6Addr>().is_ok(),
        None => name.parse::<Ipv4Addr>().is_ok(),
    }
}

/// Browsers and resolvers keep these names for this machine (RFC 6761).
fn is_localhost(name: &str) -> bool {
    let ends = |end: &str| {
        let start = name.len().checked_sub(end.len());
        start.and_then(|start| name.get(start..)).is_some_and(|own| own.eq_ignore_ascii_case(end))
    };
    name.eq_ignore_ascii_case("localhost") || ends(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_or_an_address_and_perhaps_a_port() {
        for (text, host) in [
            ("localhost", "localhost"),
            ("Example.com:8000", "Example.com"),
            ("example.com.:8000", "example.com"),
            ("127.0.0.1:1", "127.0.0.1"),
            ("[::1]:8000", "[::1]"),
            ("[::1]", "[::1]"),
            ("a_b.svc:", "a_b.svc"),
        ] {
            assert_eq!(split(text), Some(host), "{text}");
        }
        for text in [
            "", ":", ":80", ".", "a b", "a/b", "u@a", "a:b", "a:80:80", "a:123456", "[::1",
            "[::1]x", "::1", "a,b", "a\\b", "a%00", "\u{e4}",
        ] {
            assert_eq!(split(text), None, "{text}");
        }
    }

    #[test]
    fn addresses_localhost_and_known_names_are_ours() {
        let known = Names::Only(vec!["chat.example.com".into()]);
        let ours = |authority| check(Some(authority), &known).is_ok();
        for authority in [
            "127.0.0.1:8000",
            "10.1.2.3",
            "[::1]:8000",
            "[fe80::1]",
            "LocalHost:8000",
            "localhost.",
            "a.localhost",
            "chat.example.com",
            "CHAT.example.com.:443",
        ] {
            assert!(ours(authority), "{authority}");
        }
        for authority in [
            "example.com",
            "chat.example.com.evil.com",
            "xchat.example.com",
            "localhost.evil.com",
            "notlocalhost",
            "127.0.0.1.evil.com",
            "127.1",
            "0x7f000001",
            "[::1%25eth0]",
            "[evil.com]",
        ] {
            assert!(!ours(authority), "{authority}");
        }
        assert!(check(Some("evil.com"), &Names::Any).is_ok());
        assert!(check(None, &known).is_ok()); // HTTP/1.0: browsers speak 1.1
    }

    proptest::proptest! {
        #[test]
        fn whatever_passes_is_made_of_what_hosts_are_made_of(text in "[a-z0-9.:@\\[\\]/ ,_-]{0,24}|.*") {
            if let Some(host) = split(&text) {
                let made_of = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
                let good = text.starts_with(host) && !host.is_empty();
                proptest::prop_assert!(good && (host.starts_with('[') || host.chars().all(made_of)));
                let _ = check(Some(&text), &Names::Only(Vec::new()));
            }
        }
    }
}
