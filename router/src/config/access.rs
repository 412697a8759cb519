//! Who may come in: keys, the names of this server, and what may be open to everybody.

use std::net::{IpAddr, ToSocketAddrs as _};

use super::keys::{KeySet, KeySources};
use super::{ConfigError, RouterArgs, WorkerListen, flag, listen};

/// Longest name of a host, in bytes, as DNS has it.
const LONGEST_HOST: usize = 253;

/// Who may come in, and as whom.
#[derive(Debug, Clone)]
pub struct AccessConfig {
    /// Keys of clients, of which none lets everybody in, and of operators, as they were at the start.
    pub keys: KeySet,
    /// Where the keys come from.
    pub key_sources: KeySources,
    /// Everybody who reaches the clients' port sees `/metrics` there.
    pub public_metrics: bool,
    /// Where operators are served, besides the port of the clients.
    pub admin_listen: Vec<WorkerListen>,
    /// They are served nowhere else.
    pub admin_listen_only: bool,
    /// Names under which clients may reach this server, lower case.
    pub hosts: Names,
    /// Web origins whose pages may send requests, such as `https://chat.example.com`, lower case.
    pub origins: Names,
    /// Tenants share what is cached of their prompts.
    pub shared_cache: bool,
    /// What the log should say once there is one.
    pub warnings: Vec<String>,
}

/// Some names, or any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Names {
    /// Every name or origin.
    Any,
    /// These names or origins alone.
    Only(Vec<String>),
}

impl Names {
    /// True if `name` is one of them.
    #[must_use]
    pub fn contain(&self, name: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(names) => names.iter().any(|known| known.eq_ignore_ascii_case(name)),
        }
    }
}

impl AccessConfig {
    pub(super) fn check(args: &RouterArgs, warnings: Vec<String>) -> Result<Self, ConfigError> {
        let mut warnings = warnings;
        let key_sources = KeySources::of(args)?;
        let mut keys = key_sources.read()?;
        warnings.append(&mut keys.warnings);
        if args.host.is_empty() {
            return Err(flag("host", "is empty".into(), "name an address such as 127.0.0.1"));
        }
        let known = !keys.clients.is_empty() || args.tls_client_ca.is_some();
        if !known && !args.allow_anonymous_clients && is_exposed(&args.host, args.port) {
            return Err(flag(
                "host",
                format!("{} can be reached by others, and no API key is asked for", args.host),
                "give --api-key-file FILE (or HEADRACE_API_KEY), or certificates for clients and --tls-client-ca FILE, or \
                 --allow-anonymous-clients if everybody who can reach this address may use it",
            ));
        }
        let admin_listen = args.admin_listen.iter().map(|text| listen("admin-listen", text));
        let admin_listen = admin_listen.collect::<Result<Vec<_>, _>>()?;
        for address in &admin_listen {
            if keys.operators.is_empty() && is_exposed_address(address) {
                return Err(flag(
                    "admin-listen",
                    format!("{address} can be reached by others, and no key is asked for"),
                    "give --admin-key-file FILE (or HEADRACE_ADMIN_KEY), or take 127.0.0.1 or unix:PATH",
                ));
            }
        }
        if args.admin_listen_only && admin_listen.is_empty() {
            return Err(flag(
                "admin-listen-only",
                "there is no address for operators".into(),
                "give --admin-listen unix:PATH or HOST:PORT, too",
            ));
        }
        let shared_cache = match args.cache_sharing.as_str() {
            "tenant" => false,
            "all" => true,
            other => {
                let problem = format!("{other:?} is neither tenant nor all");
                return Err(flag("cache-sharing", problem, "take tenant or all"));
            }
        };
        let mut hosts = names("allowed-hosts", &args.allowed_hosts, host)?;
        if let Names::Only(names) = &mut hosts {
            names.extend(own_names(&args.host));
        }
        let origins = names("allowed-origins", &args.allowed_origins, origin)?;
        let public_metrics = args.public_metrics;
        Ok(Self {
            keys,
            key_sources,
            public_metrics,
            admin_listen,
            admin_listen_only: args.admin_listen_only,
            hosts,
            origins,
            shared_cache,
            warnings,
        })
    }
}

/// Workers that anybody could be are refused, unless they were asked for.
///
/// `known`: they have a secret or a certificate, or everybody may join.
pub(super) fn check_workers(address: &WorkerListen, known: bool) -> Result<(), ConfigError> {
    if known || !is_exposed_address(address) {
        return Ok(());
    }
    Err(flag(
        "worker-listen",
        format!("{address} can be reached by others, and workers need no secret"),
        "give --secret-file FILE (or HEADRACE_SECRET), or certificates for workers and --worker-tls-client-ca FILE, or \
         --allow-anonymous-workers if everybody who can reach this address may be sent prompts",
    ))
}

fn is_exposed_address(address: &WorkerListen) -> bool {
    match address {
        WorkerListen::Unix(_) => false,
        WorkerListen::Tcp(text) => {
            let (host, port) = text.rsplit_once(':').expect("`listen` checked it");
            is_exposed(host, port.parse().expect("`listen` checked it"))
        }
    }
}

/// True if others than processes of this machine reach this address. A name that stands for nothing cannot be bound.
fn is_exposed(host: &str, port: u16) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = host.parse::<IpAddr>() {
        return !address.to_canonical().is_loopback();
    }
    let found = (host, port).to_socket_addrs();
    found.is_ok_and(|mut all| all.any(|address| !address.ip().to_canonical().is_loopback()))
}

/// The name that is bound, and those of this machine.
fn own_names(bound: &str) -> Vec<String> {
    let system = rustix::system::uname();
    let machine = system.nodename().to_string_lossy().to_ascii_lowercase();
    let short = machine.split('.').next().unwrap_or_default();
    let mut names = vec![bound.to_ascii_lowercase()];
    if !short.is_empty() {
        names.extend([format!("{short}.local"), short.to_owned(), machine.clone()]);
    }
    names
}

fn names(
    what: &'static str,
    given: &[String],
    check: fn(&str) -> Result<(), &'static str>,
) -> Result<Names, ConfigError> {
    let given = given.iter().map(|name| name.trim().to_ascii_lowercase());
    let given: Vec<String> = given.filter(|name| !name.is_empty()).collect();
    if given.iter().any(|name| name == "*") {
        return Ok(Names::Any);
    }
    for name in &given {
        check(name).map_err(|remedy| flag(what, format!("{name:?} is not such a name"), remedy))?;
    }
    Ok(Names::Only(given))
}

fn host(name: &str) -> Result<(), &'static str> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if name.len() <= LONGEST_HOST && name.bytes().all(good) {
        return Ok(());
    }
    Err(
        "write names without a port, such as chat.example.com, or * for any; addresses need not be listed",
    )
}

fn origin(name: &str) -> Result<(), &'static str> {
    let rest = name.split_once("://").map(|(_, rest)| rest);
    if name == "null" || rest.is_some_and(|rest| !rest.is_empty() && !rest.contains('/')) {
        return Ok(());
    }
    Err(
        "write origins as browsers do, such as https://chat.example.com or http://localhost:3000, or * for any",
    )
}

#[cfg(test)]
mod tests;
