//! What was typed, and what was checked: nothing past this file sees `RouterArgs`.
//!
//! `args` is what was typed. Each part of it is checked here or in `registration` (about being found), `service` (about
//! systemd and its like), `routing` (about choosing workers), `access` with `keys` (about who may come in), `tls`, `memory`, `parsers`, `log` and `traces`.

mod access;
mod args;
pub mod argv;
pub mod environment;
mod fleet_limits;
mod keys;
mod log;
mod memory;
mod parsers;
mod registration;
mod routing;
mod service;
mod store;
mod tls;
mod traces;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::core::policy::PolicyName;

pub use access::{AccessConfig, Names};
pub(crate) use args::MAX_CONNECTIONS;
pub use args::RouterArgs;
pub use fleet_limits::FleetLimits;
pub use keys::{KeySet, KeySources, KeyTerms, Keys, KnownKey, Tenant, check_key_line, first_key};
pub use memory::MemoryConfig;
pub use parsers::{ParserConfig, ReasoningParser, ToolParser};
pub(crate) use registration::EtcdTls;
pub use registration::{EtcdAccess, EtcdVariables, Registration};
pub use routing::{DecisionLogConfig, RoutingConfig};
pub use service::{NotifyAddress, PassedSocket, ServiceConfig, ServiceVariables, SocketRole};
pub use store::StoreConfig;
pub use tls::{Reloaded, TlsListen};
pub use traces::{TracesConfig, TracesVariables};

/// Bytes that may follow each other without a place where the tokenizer lets a text be cut, where nobody says otherwise.
/// `tokenizers` takes up to 350 bytes of memory for each, and some 0.5 s for all of them.
pub const STRETCH_BYTES: usize = 512 << 10;

/// Checked configuration of a router.
#[derive(Debug, Clone)]
pub struct Config {
    /// Everything about clients and operators.
    pub http: HttpConfig,
    /// Everything about workers and their links.
    pub fleet: FleetConfig,
    /// How long each state of a request may last.
    pub deadlines: Deadlines,
    /// How much of everything there may be.
    pub bounds: RouterBounds,
    /// How much memory requests and answers may take.
    pub memory: MemoryConfig,
    /// What is kept of responses.
    pub store: StoreConfig,
    /// Tokeniser threads and cache.
    pub tokenizer: TokenizerConfig,
    /// How answers are told apart into reasoning, tool calls and the rest.
    pub parsers: ParserConfig,
    /// How a worker is chosen.
    pub policy: PolicyName,
    /// The rest of how requests are let in, placed and explained.
    pub routing: RoutingConfig,
    /// On shutdown, running requests may go on this long.
    pub drain_timeout: Duration,
    /// What is logged, and how.
    pub log: LogConfig,
    /// Metrics have vLLM's names, too.
    pub vllm_metrics: bool,
    /// Requests are traced.
    pub traces: Option<TracesConfig>,
    /// What a service manager passes and wants to hear.
    pub service: ServiceConfig,
    /// Each connection and each link stays on the thread of one core.
    pub per_core: bool,
}

/// The side of the clients.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// Name or address to bind.
    pub host: String,
    /// 0 takes a free one.
    pub port: u16,
    /// Who may come in.
    pub access: AccessConfig,
    /// TLS at their port.
    pub tls: Option<TlsListen>,
    /// Bytes of the longest body that is read.
    pub max_body_bytes: usize,
    /// Connections of clients that may be open at once.
    pub max_connections: usize,
    /// For all headers to arrive.
    pub header_timeout: Duration,
    /// For the whole body to arrive.
    pub body_timeout: Duration,
    /// Fields of a body that nobody knows are ignored, and the answer says so.
    pub unknown_pass: bool,
    /// Chats may bring their own template.
    pub request_templates: bool,
}

/// The side of the workers.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// Where they dial in.
    pub listen: WorkerListen,
    /// A Unix socket where those of this machine dial in, too, without TLS.
    pub socket: Option<PathBuf>,
    /// What they must know.
    pub secret: Option<Secret>,
    /// TLS of their links.
    pub tls: Option<TlsListen>,
    /// They give a sign of life this often.
    pub heartbeat: Duration,
    /// Silent this long, they are dropped.
    pub heartbeat_timeout: Duration,
    /// A prefill worker keeps KV for a decode worker this long.
    pub kv_lease: Duration,
    /// A decode worker waits for KV this long.
    pub transfer_timeout: Duration,
    /// From the dial to the end of the handshake.
    pub handshake_timeout: Duration,
    /// From the handshake to the last part of the snapshot, and from `Describe` to the last part of the model.
    pub describe_timeout: Duration,
    /// Links of one worker that may break within a minute before its dials are refused for a while; 0 refuses none.
    pub circuit_breaks: u32,
    /// What strangers and workers may take.
    pub limits: FleetLimits,
    /// Where it makes itself known to them.
    pub registration: Option<Registration>,
}

/// Where workers dial in, or operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerListen {
    /// An address in a network, `HOST:PORT`.
    Tcp(String),
    /// A Unix socket, `unix:PATH`.
    Unix(PathBuf),
}

/// Certificate chain and private key, both PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// File with the certificate and those that vouch for it, PEM.
    pub cert: PathBuf,
    /// File with the private key, PEM.
    pub key: PathBuf,
}

/// How long each state of a request may last.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// For a worker with room.
    pub queue: Duration,
    /// To be written to the worker.
    pub submit: Duration,
    /// From there to the first token.
    pub first_token: Duration,
    /// From token to token.
    pub token: Duration,
    /// Tokens wait, and the client takes none.
    pub stall: Duration,
    /// From arrival to the last token.
    pub request: Duration,
}

/// How much of everything there may be.
#[derive(Debug, Clone, Copy)]
pub struct RouterBounds {
    /// Answers in flight.
    pub streams: usize,
    /// Of one tenant.
    pub tenant_streams: Option<usize>,
    /// Tries on another worker.
    pub retries: u32,
}

/// Tokeniser threads and cache.
#[derive(Debug, Clone, Copy)]
pub struct TokenizerConfig {
    /// At least 1.
    pub threads: usize,
    /// Of all models together; 0 is off.
    pub cache_bytes: usize,
    /// Longest stretch of text that cannot be cut.
    pub stretch_bytes: usize,
}

/// What is logged, and how.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// A `tracing` filter.
    pub filter: String,
    /// JSON lines rather than text.
    pub json: bool,
    /// Lines about requests that ended, at most: of those that finished, and as many of those that failed. 0 writes none.
    pub requests_per_s: u32,
    /// Lines about requests have the end of the prompt.
    pub prompts: bool,
}

/// Text that no log may show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl fmt::Display for WorkerListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A flag that cannot be right.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The value of one flag cannot be right.
    #[error("--{flag}: {problem}; {remedy}")]
    Flag {
        /// Name, without dashes.
        flag: &'static str,
        /// What is wrong.
        problem: String,
        /// What would be right.
        remedy: String,
    },
    /// The value of a variable of the environment.
    #[error("{variable}: {problem}; {remedy}")]
    Variable {
        /// Name of the variable.
        variable: &'static str,
        /// What is wrong.
        problem: String,
        /// What would be right.
        remedy: String,
    },
    /// The file that it names.
    #[error("--{flag}: cannot read {path}: {source}")]
    File {
        /// Name, without dashes.
        flag: &'static str,
        /// Path of the file.
        path: String,
        /// What the system said of it.
        source: std::io::Error,
    },
}

impl TryFrom<RouterArgs> for Config {
    type Error = ConfigError;

    fn try_from(mut args: RouterArgs) -> Result<Self, ConfigError> {
        let log = log::check(&args)?;
        let vllm_metrics = log::vllm_metrics(&args)?;
        let traces = TracesConfig::check(&args)?;
        let service = ServiceConfig::check(&args.service, std::process::id())?;
        service.place(&mut args)?;
        let routing = RoutingConfig::check(&args)?;
        let mut warnings = Vec::new();
        let listen = listen("worker-listen", &args.worker_listen)?;
        let secret = secret(args.secret.as_deref(), args.secret_file.as_deref(), &mut warnings)?;
        let (ca, cert, key) =
            (&args.worker_tls_client_ca, &args.worker_tls_cert, &args.worker_tls_key);
        let worker_tls = tls::WORKERS.check(cert.clone(), key.clone(), ca.clone())?;
        let known = secret.is_some() || ca.is_some() || args.allow_anonymous_workers;
        access::check_workers(&listen, known)?;
        let (ca, cert, key) = (&args.tls_client_ca, &args.tls_cert, &args.tls_key);
        let client_tls = tls::CLIENTS.check(cert.clone(), key.clone(), ca.clone())?;
        let access = AccessConfig::check(&args, warnings)?;
        let memory = MemoryConfig::check(&args)?;
        let parsers = ParserConfig::check(&args)?;
        let store = StoreConfig::check(&args)?;
        let fleet = FleetConfig {
            limits: FleetLimits::check(&args)?,
            registration: Registration::check(&args, &listen)?,
            listen,
            socket: worker_socket(args.worker_socket)?,
            circuit_breaks: args.circuit_breaks,
            secret,
            tls: worker_tls,
            heartbeat: millis("heartbeat-ms", args.heartbeat_ms)?,
            heartbeat_timeout: millis("heartbeat-timeout-ms", args.heartbeat_timeout_ms)?,
            kv_lease: millis("kv-lease-ms", args.kv_lease_ms)?,
            transfer_timeout: millis("transfer-timeout-ms", args.transfer_timeout_ms)?,
            handshake_timeout: millis("handshake-timeout-ms", args.handshake_timeout_ms)?,
            describe_timeout: millis("describe-timeout-ms", args.describe_timeout_ms)?,
        };
        if fleet.heartbeat > Duration::from_secs(3_600) {
            return Err(flag(
                "heartbeat-ms",
                format!("is {}", args.heartbeat_ms),
                "it may be an hour at most",
            ));
        }
        if fleet.heartbeat_timeout <= 3 * fleet.heartbeat {
            return Err(flag(
                "heartbeat-timeout-ms",
                format!("is {}", args.heartbeat_timeout_ms),
                &format!("it must be more than three heartbeats ({} ms)", 3 * args.heartbeat_ms),
            ));
        }
        let http = HttpConfig {
            host: args.host,
            port: args.port,
            access,
            tls: client_tls,
            max_body_bytes: at_least_one("max-body-bytes", args.max_body_bytes)?,
            max_connections: at_least_one("max-connections", args.max_connections)?,
            header_timeout: millis("header-timeout-ms", args.header_timeout_ms)?,
            body_timeout: millis("body-timeout-ms", args.body_timeout_ms)?,
            unknown_pass: unknown_pass(&args.unknown_parameters)?,
            request_templates: args.allow_request_templates,
        };
        let deadlines = Deadlines {
            queue: Duration::from_millis(args.queue_timeout_ms),
            submit: millis("submit-timeout-ms", args.submit_timeout_ms)?,
            first_token: millis("first-token-timeout-ms", args.first_token_timeout_ms)?,
            token: millis("token-timeout-ms", args.token_timeout_ms)?,
            stall: millis("stall-timeout-ms", args.stall_timeout_ms)?,
            request: millis("request-timeout-ms", args.request_timeout_ms)?,
        };
        let bounds = RouterBounds {
            streams: at_least_one("max-streams", args.max_streams)?,
            tenant_streams: (args.tenant_streams > 0).then_some(args.tenant_streams),
            retries: args.retries,
        };
        let threads = match args.tokenizer_threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            n @ 1..=1024 => n,
            n => {
                return Err(flag(
                    "tokenizer-threads",
                    format!("is {n}"),
                    "0 to 1024; 0 takes one for every two cores",
                ));
            }
        };
        Ok(Self {
            http,
            fleet,
            deadlines,
            bounds,
            memory,
            store,
            tokenizer: TokenizerConfig {
                threads,
                cache_bytes: args.tokenizer_cache_bytes,
                stretch_bytes: at_least_one(
                    "tokenizer-stretch-bytes",
                    args.tokenizer_stretch_bytes,
                )?,
            },
            parsers,
            policy: policy("policy", &args.policy)?,
            routing,
            drain_timeout: Duration::from_millis(args.drain_timeout_ms),
            log,
            vllm_metrics,
            traces,
            service,
            per_core: per_core(&args.runtime)?,
        })
    }
}

fn flag(flag: &'static str, problem: String, remedy: &str) -> ConfigError {
    ConfigError::Flag { flag, problem, remedy: remedy.to_owned() }
}

/// Where `value` came from: `variable` if that holds it, otherwise the flag.
fn flag_or_variable(
    name: &'static str,
    variable: &'static str,
    value: &str,
    problem: String,
    remedy: &str,
) -> ConfigError {
    if environment::one(variable).as_deref() != Some(value) {
        return flag(name, problem, remedy);
    }
    ConfigError::Variable { variable, problem, remedy: remedy.to_owned() }
}

fn per_core(word: &str) -> Result<bool, ConfigError> {
    match word {
        "shared" => Ok(false),
        "per-core" => Ok(true),
        _ => {
            let problem = format!("{word:?} is none");
            Err(flag("runtime", problem, "take shared or per-core"))
        }
    }
}

fn unknown_pass(word: &str) -> Result<bool, ConfigError> {
    match word {
        "refuse" => Ok(false),
        "warn" => Ok(true),
        _ => {
            let problem = format!("{word:?} is not a way to treat them");
            Err(flag("unknown-parameters", problem, "take refuse or warn"))
        }
    }
}

fn millis(name: &'static str, ms: u64) -> Result<Duration, ConfigError> {
    if ms == 0 {
        return Err(flag(name, "is 0".into(), "it must be at least 1 ms"));
    }
    Ok(Duration::from_millis(ms))
}

fn at_least_one(name: &'static str, n: usize) -> Result<usize, ConfigError> {
    if n == 0 {
        return Err(flag(name, "is 0".into(), "it must be at least 1"));
    }
    Ok(n)
}

fn listen(name: &'static str, text: &str) -> Result<WorkerListen, ConfigError> {
    if let Some(path) = text.strip_prefix("unix:") {
        if path.is_empty() {
            return Err(flag(name, "names no path".into(), "write unix:/path/to/socket"));
        }
        return Ok(WorkerListen::Unix(path.into()));
    }
    let port = text.rsplit_once(':').and_then(|(host, port)| {
        let host_ok =
            !host.is_empty() && (!host.contains(':') || text.parse::<SocketAddr>().is_ok());
        host_ok.then(|| port.parse::<u16>().ok()).flatten()
    });
    match port {
        Some(_) => Ok(WorkerListen::Tcp(text.to_owned())),
        None => Err(flag(
            name,
            format!("{text:?} is not an address"),
            "write HOST:PORT, such as 0.0.0.0:8001 or [::]:8001, or unix:/path/to/socket",
        )),
    }
}

fn worker_socket(path: Option<PathBuf>) -> Result<Option<PathBuf>, ConfigError> {
    match path {
        Some(path) if path.as_os_str().is_empty() => {
            Err(flag("worker-socket", "names no path".into(), "write a path such as /run/socket"))
        }
        path => Ok(path),
    }
}

fn secret(
    text: Option<&str>,
    file: Option<&Path>,
    warnings: &mut Vec<String>,
) -> Result<Option<Secret>, ConfigError> {
    let given = match (file, text) {
        (Some(path), _) => keys::read("secret-file", path, warnings)?,
        (None, Some(text)) => text.to_owned(),
        (None, None) => return Ok(None),
    };
    let secret = given.trim_end_matches(['\r', '\n']);
    if secret.len() < 8 {
        let problem = format!("the secret has {} bytes", secret.len());
        let remedy = "use at least 8, such as the output of `openssl rand -hex 16`";
        return Err(match file {
            Some(_) => flag("secret-file", problem, remedy),
            None => flag_or_variable("secret-file", "HEADRACE_SECRET", &given, problem, remedy),
        });
    }
    Ok(Some(Secret(secret.to_owned())))
}

fn policy(what: &'static str, name: &str) -> Result<PolicyName, ConfigError> {
    name.parse().map_err(|()| {
        let names: Vec<&str> = PolicyName::ALL.iter().map(|policy| policy.as_str()).collect();
        flag(
            what,
            format!("{name:?} is not a policy"),
            &format!("take one of {}", names.join(", ")),
        )
    })
}

#[cfg(test)]
mod tests;
