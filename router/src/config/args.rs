//! What was typed.

use std::path::PathBuf;

use clap::Parser as _;

use super::environment;

/// Of clients, where nobody named another number.
pub(crate) const MAX_CONNECTIONS: usize = 32_768;

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
    /// How a worker is chosen: kv, round-robin, least-loaded, power-of-two or session-hash.
    #[arg(long, default_value = "kv")]
    pub policy: String,
    /// A second policy that chooses nothing: each decision notes what it would have chosen, and at what cost.
    #[arg(long, value_name = "POLICY", help_heading = "Routing")]
    pub shadow: Option<String>,
    /// Under `kv`, a request waits in the router, where class, fairness and deadlines still count, while every worker has
    /// more ms of prompts ahead than this.
    #[arg(long, value_name = "MS", default_value_t = 5_000, help_heading = "Routing")]
    pub worker_queue_ms: u64,
    /// The first token is wanted within this time from the arrival of the request, in ms; whoever cannot get it is turned
    /// away at once. The header X-Headrace-TTFT-Deadline-Ms of a request wins over it. 0 is no deadline.
    #[arg(long, value_name = "MS", default_value_t = 0, help_heading = "Routing")]
    pub ttft_deadline_ms: u64,
    /// Requests with a deadline count as slow, in the metrics, if their tokens take longer than this each, in ms. 0 is
    /// no limit.
    #[arg(long, value_name = "MS", default_value_t = 0.0, help_heading = "Routing")]
    pub slo_tpot_ms: f64,
    /// Whoever waits for a worker climbs one class (low, normal, high) in this time, in ms.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Routing")]
    pub queue_ageing_ms: u64,
    /// Least shares of the dispatched tokens that the classes high, normal and low get while they wait.
    #[arg(
        long,
        value_name = "H,N,L",
        value_delimiter = ',',
        default_value = "0.5,0.2,0.05",
        help_heading = "Routing"
    )]
    pub queue_floors: Vec<f64>,
    /// File to which each decision is written as a line of JSON; `headrace sim --replay` reads it.
    #[arg(long, value_name = "PATH", help_heading = "Routing")]
    pub decision_log: Option<PathBuf>,
    /// Most bytes of that file and of the one before it, PATH.1, together.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, help_heading = "Routing")]
    pub decision_log_bytes: u64,

    /// File with the secret that workers must know to join; or set HEADRACE_SECRET.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub secret_file: Option<PathBuf>,
    /// The secret itself, from the variable HEADRACE_SECRET.
    #[arg(skip = environment::one("HEADRACE_SECRET"))]
    pub secret: Option<String>,
    /// Let workers join that know no secret, although --worker-listen is open to other machines: whoever reaches that
    /// address is sent prompts.
    #[arg(long, help_heading = "Security")]
    pub allow_anonymous_workers: bool,
    /// File with the keys of clients, one a line: KEY, or TENANT KEY to give several keys to one tenant. Clients send one
    /// as `Authorization: Bearer KEY`. Without keys everybody is served. The variable HEADRACE_API_KEY takes keys with
    /// commas between them.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub api_key_file: Option<PathBuf>,
    /// Keys of clients, from the variable HEADRACE_API_KEY.
    #[arg(skip = environment::several("HEADRACE_API_KEY"))]
    pub api_key: Vec<String>,
    /// Serve everybody, although --host is open to other machines and there are no keys.
    #[arg(long, help_heading = "Security")]
    pub allow_anonymous_clients: bool,
    /// File with the keys of operators, one a line, for /workers, drains, and everybody's decisions; or set
    /// HEADRACE_ADMIN_KEY. Without these and without keys of clients, processes of this machine are operators.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub admin_key_file: Option<PathBuf>,
    /// Keys of operators, from the variable HEADRACE_ADMIN_KEY.
    #[arg(skip = environment::several("HEADRACE_ADMIN_KEY"))]
    pub admin_key: Vec<String>,
    /// Another address for operators: unix:PATH, which only this user can open and which asks for no key, or HOST:PORT.
    /// It may be given several times.
    #[arg(long, value_name = "ADDRESS", help_heading = "Security")]
    pub admin_listen: Vec<String>,
    /// Names of hosts under which clients without a key reach this server, or * for any. The name in --host, those of
    /// this machine, localhost and all addresses are known. Pages in browsers could use other names to get at it.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Security")]
    pub allowed_hosts: Vec<String>,
    /// Web origins, such as https://chat.example.com, whose pages may send requests without a key, or * for any. Its own
    /// origin may.
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',', help_heading = "Security")]
    pub allowed_origins: Vec<String>,
    /// Who shares what is cached of prompts: only requests of one tenant (tenant), or all (all). Where there are no keys,
    /// all do; a request can set itself apart with `cache_salt`.
    #[arg(long, value_name = "WHO", default_value = "tenant", help_heading = "Security")]
    pub cache_sharing: String,
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
    /// Answers of one tenant (its API key, its X-Headrace-Tenant, or else its address) that may be under way at once. 0 sets
    /// no such bound: a tenant may then have seven times as many as are free, seven eighths of all if it is alone.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Bounds")]
    pub tenant_streams: usize,
    /// Connections of clients that may be open at once.
    #[arg(long, value_name = "N", default_value_t = MAX_CONNECTIONS, help_heading = "Bounds")]
    pub max_connections: usize,
    /// Longest body of a request, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20, help_heading = "Bounds")]
    pub max_body_bytes: usize,
    /// Memory that all request bodies may take, in bytes, with what is made of them until they are tokenised. One of them
    /// may take 8 times --max-body-bytes and 4 MiB.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, help_heading = "Bounds")]
    pub max_body_memory_bytes: usize,
    /// Memory that may be taken by what is kept of all answers, in bytes: text and log-probabilities until clients have read
    /// them, and stop strings. One answer may take half of it.
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20, help_heading = "Bounds")]
    pub max_answer_memory_bytes: usize,
    /// Answers that may wait for a worker with room.
    #[arg(long, value_name = "N", default_value_t = 4_096, help_heading = "Bounds")]
    pub queue_requests: usize,
    /// Prompt tokens that may wait for a worker with room.
    #[arg(long, value_name = "TOKENS", default_value_t = 16 << 20, help_heading = "Bounds")]
    pub queue_tokens: usize,
    /// Memory of what may wait for a worker with room, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, help_heading = "Bounds")]
    pub queue_bytes: u64,
    /// How many workers in a row may fail an answer without giving a token of it, before it fails; less one.
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Bounds")]
    pub retries: u32,

    /// Threads that render templates and tokenise; 0 takes one for every two cores.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Tokeniser")]
    pub tokenizer_threads: usize,
    /// Longest stretch of a text that its model's tokenizer cannot cut into pieces, in bytes: without spaces, line breaks or
    /// punctuation after a letter, or all of it where nothing is known of how the tokenizer splits words. Takes up to 350
    /// bytes of memory for each, for one such text at a time.
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = crate::prompt::STRETCH_BYTES,
        help_heading = "Tokeniser"
    )]
    pub tokenizer_stretch_bytes: usize,
    /// Memory for tokenised prefixes of prompts, of all models together, in bytes; 0 switches the cache off.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, help_heading = "Tokeniser")]
    pub tokenizer_cache_bytes: usize,

    /// A worker gives a sign of life this often, in ms. Three missed, and its requests go on elsewhere.
    #[arg(long, value_name = "MS", default_value_t = 1_000, help_heading = "Workers")]
    pub heartbeat_ms: u64,
    /// A worker that is silent this long is dropped, in ms.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Workers")]
    pub heartbeat_timeout_ms: u64,
    /// A prefill worker keeps a prompt's KV for its decode worker this long after the first token, in ms.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Workers")]
    pub kv_lease_ms: u64,
    /// A decode worker waits this long after the first token for a prompt's KV, in ms; then it computes the prompt itself.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Deadlines")]
    pub transfer_timeout_ms: u64,
    /// A worker that dials must have introduced itself in this time, in ms.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Workers")]
    pub handshake_timeout_ms: u64,
    /// A connection to the workers' port must have sent its first byte in this time, in ms.
    #[arg(long, value_name = "MS", default_value_t = 2_000, help_heading = "Workers")]
    pub first_byte_timeout_ms: u64,
    /// KV blocks that the index of who holds what keeps for all workers together, up to 64 bytes each. No worker gets more
    /// than an eighth of it; one that holds more serves without credit for its cache.
    #[arg(long, value_name = "N", default_value_t = 1 << 25, help_heading = "Bounds")]
    pub max_index_blocks: u64,
    /// Bytes of all models' tokenizers and templates together, as workers send them.
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20, help_heading = "Bounds")]
    pub max_description_bytes: usize,
    /// A worker that joined must have said which blocks it holds in this time, and one that was asked for its model's
    /// tokeniser must have sent it, in ms.
    #[arg(long, value_name = "MS", default_value_t = 60_000, help_heading = "Workers")]
    pub describe_timeout_ms: u64,

    /// A worker whose links break more often than this within a minute is held off for a growing time; 0 holds nobody off.
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Workers")]
    pub circuit_breaks: u32,
    /// Make this router known to workers (`headrace worker --router etcd:...`): etcd:HOST:PORT[,HOST:PORT]/PREFIX.
    #[arg(long, value_name = "ETCD", help_heading = "Workers")]
    pub register: Option<String>,
    /// Under which HOST:PORT workers reach it; needed where --worker-listen is no address to dial.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Workers")]
    pub advertise: Option<String>,
    /// A router that vanishes is forgotten by etcd after this time, in seconds.
    #[arg(long, value_name = "S", default_value_t = 10, help_heading = "Workers")]
    pub register_ttl_s: u32,

    /// What is logged: error, warn (or warning), info, debug, trace, off, or a filter such as
    /// `info,headrace_router::fleet=debug`.
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
