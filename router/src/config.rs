//! What was typed, and what was checked: nothing past this file sees `RouterArgs`.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser as _;

use crate::core::policy::PolicyName;

/// The flags of `headrace router` and of the binary `headrace-router`; the Python binding takes the same names.
#[derive(Debug, Clone, clap::Args, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterArgs {
    /// Address on which clients are served.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port on which clients are served; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Where workers dial in: HOST:PORT, or unix:PATH for a Unix socket.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8001")]
    pub worker_listen: String,
    /// How a worker is chosen: round-robin, least-loaded, power-of-two or session-hash.
    #[arg(long, default_value = "least-loaded")]
    pub policy: String,

    /// File with the secret that workers must know to join.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub secret_file: Option<PathBuf>,
    /// The secret itself. Other users of this machine can read command lines: prefer the variable or the file.
    #[arg(long, env = "HEADRACE_SECRET", hide_env_values = true, help_heading = "Security")]
    pub secret: Option<String>,
    /// Keys of which clients must send one (`Authorization: Bearer KEY`); none means everybody is served.
    #[arg(
        long,
        env = "HEADRACE_API_KEY",
        hide_env_values = true,
        value_delimiter = ',',
        help_heading = "Security"
    )]
    pub api_key: Vec<String>,
    /// Certificate chain (PEM) for the workers' links; needs --worker-tls-key.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub worker_tls_cert: Option<PathBuf>,
    /// Private key (PEM) for the workers' links.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub worker_tls_key: Option<PathBuf>,

    /// Longest wait for a worker with room, in ms.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Deadlines")]
    pub queue_timeout_ms: u64,
    /// Longest time in which a request must be written to its worker, in ms.
    #[arg(long, value_name = "MS", default_value_t = 5_000, help_heading = "Deadlines")]
    pub submit_timeout_ms: u64,
    /// Longest wait for the first token after the request was sent to a worker, in ms.
    #[arg(long, value_name = "MS", default_value_t = 300_000, help_heading = "Deadlines")]
    pub first_token_timeout_ms: u64,
    /// Longest wait for each further token, in ms.
    #[arg(long, value_name = "MS", default_value_t = 60_000, help_heading = "Deadlines")]
    pub token_timeout_ms: u64,
    /// A client that takes nothing of what waits for it this long is cut off, in ms.
    #[arg(long, value_name = "MS", default_value_t = 60_000, help_heading = "Deadlines")]
    pub stall_timeout_ms: u64,
    /// Longest life of a request, from its arrival to its last token, in ms.
    #[arg(long, value_name = "MS", default_value_t = 3_600_000, help_heading = "Deadlines")]
    pub request_timeout_ms: u64,
    /// Longest time for the headers of a request to arrive, from their first byte on, in ms. A connection that is kept
    /// for later requests may rest longer.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Deadlines")]
    pub header_timeout_ms: u64,
    /// Longest time for the body of a request to arrive, in ms.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Deadlines")]
    pub body_timeout_ms: u64,
    /// On shutdown, how long running requests may go on, in ms.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Deadlines")]
    pub drain_timeout_ms: u64,

    /// Answers (choices count singly) that may be under way at once.
    #[arg(long, value_name = "N", default_value_t = 16_384, help_heading = "Bounds")]
    pub max_streams: usize,
    /// Connections of clients that may be open at once.
    #[arg(long, value_name = "N", default_value_t = 32_768, help_heading = "Bounds")]
    pub max_connections: usize,
    /// Longest body of a request, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20, help_heading = "Bounds")]
    pub max_body_bytes: usize,
    /// Answers that may wait for a worker with room.
    #[arg(long, value_name = "N", default_value_t = 4_096, help_heading = "Bounds")]
    pub queue_requests: usize,
    /// Prompt tokens that may wait for a worker with room.
    #[arg(long, value_name = "TOKENS", default_value_t = 16 << 20, help_heading = "Bounds")]
    pub queue_tokens: usize,
    /// How often an answer of which nothing was sent yet is tried on another worker.
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Bounds")]
    pub retries: u32,

    /// Threads that render templates and tokenise; 0 takes one for every two cores.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Tokeniser")]
    pub tokenizer_threads: usize,
    /// Memory for tokenised prefixes of prompts, in bytes; 0 switches the cache off.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, help_heading = "Tokeniser")]
    pub tokenizer_cache_bytes: usize,

    /// A worker gives a sign of life this often, in ms. Three missed, and it gets no new work.
    #[arg(long, value_name = "MS", default_value_t = 1_000, help_heading = "Workers")]
    pub heartbeat_ms: u64,
    /// A worker that is silent this long is dropped, in ms.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Workers")]
    pub heartbeat_timeout_ms: u64,
    /// A worker that dials must have introduced itself in this time, in ms.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Workers")]
    pub handshake_timeout_ms: u64,
    /// A worker that joined must have said which blocks it holds in this time, and one that was asked for its model's
    /// tokeniser must have sent it, in ms.
    #[arg(long, value_name = "MS", default_value_t = 60_000, help_heading = "Workers")]
    pub describe_timeout_ms: u64,

    /// What is logged: error, warn, info, debug, trace, or a filter such as `info,headrace_router::fleet=debug`.
    #[arg(long, env = "HEADRACE_LOG", default_value = "info", help_heading = "Log")]
    pub log_level: String,
    /// How it is logged: text or json.
    #[arg(long, default_value = "text", help_heading = "Log")]
    pub log_format: String,
}

impl Default for RouterArgs {
    /// What the command line gives without any flag.
    fn default() -> Self {
        #[derive(clap::Parser)]
        struct NoFlags {
            #[command(flatten)]
            args: RouterArgs,
        }
        NoFlags::parse_from(["headrace-router"]).args
    }
}

/// Checked configuration of a router.
#[derive(Debug, Clone)]
pub struct Config {
    /// Clients.
    pub http: HttpConfig,
    /// Workers.
    pub fleet: FleetConfig,
    /// How long each state of a request may last.
    pub deadlines: Deadlines,
    /// How much of everything there may be.
    pub bounds: Bounds,
    /// Tokeniser threads and cache.
    pub tokenizer: TokenizerConfig,
    /// How a worker is chosen.
    pub policy: PolicyName,
    /// On shutdown, running requests may go on this long.
    pub drain_timeout: Duration,
    /// What is logged, and how.
    pub log: LogConfig,
}

/// The side of the clients.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// Name or address to bind.
    pub host: String,
    /// 0 takes a free one.
    pub port: u16,
    /// Keys of which clients must send one; empty lets everybody in.
    pub api_keys: Vec<Secret>,
    /// Longest body.
    pub max_body_bytes: usize,
    /// Open connections.
    pub max_connections: usize,
    /// For all headers to arrive.
    pub header_timeout: Duration,
    /// For the whole body to arrive.
    pub body_timeout: Duration,
}

/// The side of the workers.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// Where they dial in.
    pub listen: WorkerListen,
    /// What they must know.
    pub secret: Option<Secret>,
    /// Certificate and key of their links.
    pub tls: Option<TlsFiles>,
    /// They give a sign of life this often.
    pub heartbeat: Duration,
    /// Silent this long, they are dropped.
    pub heartbeat_timeout: Duration,
    /// From the dial to the end of the handshake.
    pub handshake_timeout: Duration,
    /// From the handshake to the last part of the snapshot, and from `Describe` to the last part of the model.
    pub describe_timeout: Duration,
}

/// Where workers dial in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerListen {
    /// `HOST:PORT`.
    Tcp(String),
    /// `unix:PATH`.
    Unix(PathBuf),
}

/// Certificate chain and private key, both PEM.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// Chain.
    pub cert: PathBuf,
    /// Key.
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
pub struct Bounds {
    /// Answers under way.
    pub streams: usize,
    /// Answers that wait for a worker.
    pub queue_requests: usize,
    /// Their prompt tokens.
    pub queue_tokens: usize,
    /// Tries on another worker.
    pub retries: u32,
}

/// Tokeniser threads and cache.
#[derive(Debug, Clone, Copy)]
pub struct TokenizerConfig {
    /// At least 1.
    pub threads: usize,
    /// 0 is off.
    pub cache_bytes: usize,
}

/// What is logged, and how.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// A `tracing` filter.
    pub filter: String,
    /// JSON lines rather than text.
    pub json: bool,
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
    /// Its value.
    #[error("--{flag}: {problem}; {remedy}")]
    Flag {
        /// Name, without dashes.
        flag: &'static str,
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
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

impl TryFrom<RouterArgs> for Config {
    type Error = ConfigError;

    fn try_from(args: RouterArgs) -> Result<Self, ConfigError> {
        let fleet = FleetConfig {
            listen: worker_listen(&args.worker_listen)?,
            secret: secret(args.secret, args.secret_file.as_deref())?,
            tls: tls_files(args.worker_tls_cert, args.worker_tls_key)?,
            heartbeat: millis("heartbeat-ms", args.heartbeat_ms)?,
            heartbeat_timeout: millis("heartbeat-timeout-ms", args.heartbeat_timeout_ms)?,
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
        if args.host.is_empty() {
            return Err(flag("host", "is empty".into(), "name an address such as 127.0.0.1"));
        }
        if args.api_key.iter().any(String::is_empty) {
            return Err(flag("api-key", "is empty".into(), "leave it out to let everybody in"));
        }
        let http = HttpConfig {
            host: args.host,
            port: args.port,
            api_keys: args.api_key.into_iter().map(Secret).collect(),
            max_body_bytes: at_least_one("max-body-bytes", args.max_body_bytes)?,
            max_connections: at_least_one("max-connections", args.max_connections)?,
            header_timeout: millis("header-timeout-ms", args.header_timeout_ms)?,
            body_timeout: millis("body-timeout-ms", args.body_timeout_ms)?,
        };
        let deadlines = Deadlines {
            queue: Duration::from_millis(args.queue_timeout_ms),
            submit: millis("submit-timeout-ms", args.submit_timeout_ms)?,
            first_token: millis("first-token-timeout-ms", args.first_token_timeout_ms)?,
            token: millis("token-timeout-ms", args.token_timeout_ms)?,
            stall: millis("stall-timeout-ms", args.stall_timeout_ms)?,
            request: millis("request-timeout-ms", args.request_timeout_ms)?,
        };
        let bounds = Bounds {
            streams: at_least_one("max-streams", args.max_streams)?,
            queue_requests: args.queue_requests,
            queue_tokens: args.queue_tokens,
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
            tokenizer: TokenizerConfig { threads, cache_bytes: args.tokenizer_cache_bytes },
            policy: policy(&args.policy)?,
            drain_timeout: Duration::from_millis(args.drain_timeout_ms),
            log: log(args.log_level, &args.log_format)?,
        })
    }
}

fn flag(flag: &'static str, problem: String, remedy: &str) -> ConfigError {
    ConfigError::Flag { flag, problem, remedy: remedy.to_owned() }
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

fn worker_listen(text: &str) -> Result<WorkerListen, ConfigError> {
    if let Some(path) = text.strip_prefix("unix:") {
        if path.is_empty() {
            return Err(flag(
                "worker-listen",
                "names no path".into(),
                "write unix:/path/to/socket",
            ));
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
            "worker-listen",
            format!("{text:?} is no address"),
            "write HOST:PORT, such as 0.0.0.0:8001 or [::]:8001, or unix:/path/to/socket",
        )),
    }
}

fn secret(text: Option<String>, file: Option<&Path>) -> Result<Option<Secret>, ConfigError> {
    let (name, text) = match (file, text) {
        (Some(path), _) => {
            let text = std::fs::read_to_string(path).map_err(|source| ConfigError::File {
                flag: "secret-file",
                path: path.display().to_string(),
                source,
            })?;
            ("secret-file", text.trim_end_matches(['\r', '\n']).to_owned())
        }
        (None, Some(text)) => ("secret", text),
        (None, None) => return Ok(None),
    };
    if text.len() < 8 {
        return Err(flag(
            name,
            format!("the secret has {} bytes", text.len()),
            "use at least 8, such as the output of `openssl rand -hex 16`",
        ));
    }
    Ok(Some(Secret(text)))
}

fn tls_files(cert: Option<PathBuf>, key: Option<PathBuf>) -> Result<Option<TlsFiles>, ConfigError> {
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(cert), Some(key)) => Ok(Some(TlsFiles { cert, key })),
        (Some(_), None) => Err(flag(
            "worker-tls-key",
            "is missing".into(),
            "--worker-tls-cert needs the key that belongs to it",
        )),
        (None, Some(_)) => Err(flag(
            "worker-tls-cert",
            "is missing".into(),
            "--worker-tls-key needs the certificate that belongs to it",
        )),
    }
}

fn policy(name: &str) -> Result<PolicyName, ConfigError> {
    name.parse().map_err(|()| {
        let names: Vec<&str> = PolicyName::ALL.iter().map(|policy| policy.as_str()).collect();
        flag(
            "policy",
            format!("there is no {name:?}"),
            &format!("take one of {}", names.join(", ")),
        )
    })
}

fn log(filter: String, format: &str) -> Result<LogConfig, ConfigError> {
    if let Err(error) = tracing_subscriber::EnvFilter::try_new(&filter) {
        return Err(flag(
            "log-level",
            format!("{filter:?} is no filter ({error})"),
            "take error, warn, info, debug or trace",
        ));
    }
    match format {
        "text" => Ok(LogConfig { filter, json: false }),
        "json" => Ok(LogConfig { filter, json: true }),
        _ => Err(flag("log-format", format!("there is no {format:?}"), "take text or json")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut RouterArgs)) -> String {
        let mut args = RouterArgs::default();
        change(&mut args);
        Config::try_from(args).unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_right() {
        let config = Config::try_from(RouterArgs::default()).unwrap();
        assert_eq!(config.http.max_body_bytes, 16 << 20);
        assert_eq!(config.fleet.listen, WorkerListen::Tcp("127.0.0.1:8001".into()));
        assert!(config.tokenizer.threads >= 1);
    }

    #[test]
    fn every_error_names_its_flag_and_a_remedy() {
        for (message, name) in [
            (refused(|a| a.worker_listen = "8001".into()), "--worker-listen"),
            (refused(|a| a.worker_listen = "::1:8001x".into()), "--worker-listen"),
            (refused(|a| a.worker_listen = "unix:".into()), "--worker-listen"),
            (refused(|a| a.policy = "random".into()), "--policy"),
            (refused(|a| a.secret = Some("short".into())), "--secret"),
            (refused(|a| a.worker_tls_cert = Some("x.pem".into())), "--worker-tls-key"),
            (refused(|a| a.token_timeout_ms = 0), "--token-timeout-ms"),
            (refused(|a| a.max_streams = 0), "--max-streams"),
            (refused(|a| a.heartbeat_timeout_ms = 3_000), "--heartbeat-timeout-ms"),
            (refused(|a| a.tokenizer_threads = 5_000), "--tokenizer-threads"),
            (refused(|a| a.log_format = "xml".into()), "--log-format"),
            (refused(|a| a.log_level = "a=b=c".into()), "--log-level"),
        ] {
            assert!(message.starts_with(name), "{message}");
            assert!(message.contains("; "), "no remedy in {message}");
        }
        let message = refused(|a| a.secret_file = Some("/nonexistent/secret".into()));
        assert!(message.starts_with("--secret-file: cannot read"), "{message}");
    }

    #[test]
    fn addresses_of_all_kinds_are_read() {
        for text in ["127.0.0.1:0", "[::1]:8001", "localhost:9000"] {
            assert_eq!(worker_listen(text).unwrap(), WorkerListen::Tcp(text.into()));
        }
        assert_eq!(worker_listen("unix:/a/b").unwrap(), WorkerListen::Unix("/a/b".into()));
    }

    #[test]
    fn a_dict_takes_the_same_names_and_no_others() {
        let args: RouterArgs = serde_json::from_str(r#"{"port": 0, "api_key": ["k"]}"#).unwrap();
        assert_eq!((args.port, args.api_key.len()), (0, 1));
        let error = serde_json::from_str::<RouterArgs>(r#"{"prot": 1}"#).unwrap_err().to_string();
        assert!(error.contains("prot"), "{error}");
    }

    #[test]
    fn secrets_do_not_show() {
        assert!(!format!("{:?}", Secret("hunter22".into())).contains("hunter"));
    }
}
