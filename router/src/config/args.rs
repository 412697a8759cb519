//! What was typed.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Parser as _};

use super::parsers::NO_PARSER;
use super::{
    EtcdVariables, ReasoningParser, ServiceVariables, ToolParser, TracesVariables, environment,
};
use crate::core::policy::PolicyName;

/// Of clients, where nobody named another number.
pub(crate) const MAX_CONNECTIONS: usize = 32_768;

/// The flags of `headrace router` and of the binary `headrace-router`; the Python binding takes the same names.
#[derive(Debug, Clone, clap::Args, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterArgs {
    /// Address at which clients are served.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port at which clients are served. 0 takes a free port.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Address at which workers dial in: HOST:PORT, or unix:PATH for a Unix socket.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8001")]
    pub worker_listen: String,
    /// Unix socket at which workers of this machine dial in, besides --worker-listen. Its links use no TLS: only the
    /// user who runs the router can open the socket.
    #[arg(long, value_name = "PATH")]
    pub worker_socket: Option<PathBuf>,
    /// Rule by which a worker is chosen for a request. kv predicts times from cache content and load.
    #[arg(long, default_value = "kv", value_parser = policies())]
    pub policy: String,
    /// Second policy, which chooses nothing: each decision notes which worker that policy would have chosen, and at
    /// what cost. Without the flag no second policy runs.
    #[arg(long, value_name = "POLICY", value_parser = policies(), help_heading = "Routing")]
    pub shadow: Option<String>,
    /// Milliseconds of prompts ahead on every worker above which a request waits in the router, where class, fairness
    /// and deadlines still count. For the policy kv.
    #[arg(long, value_name = "MS", default_value_t = 5_000, help_heading = "Routing")]
    pub worker_queue_ms: u64,
    /// Milliseconds in which requests that come together are gathered and then placed together, the longest prompt first.
    /// Only requests that would wait in a worker for twice as long gather. 0 places each by itself. For the policy kv.
    #[arg(long, value_name = "MS", default_value_t = 2.0, help_heading = "Routing")]
    pub gather_ms: f64,
    /// Milliseconds from the arrival of a request to its first token. A request that cannot meet the deadline is
    /// refused at once. The header X-Headrace-TTFT-Deadline-Ms of a request goes before this flag. 0 sets no deadline.
    #[arg(long, value_name = "MS", default_value_t = 0, help_heading = "Routing")]
    pub ttft_deadline_ms: u64,
    /// Milliseconds for each token after the first. Requests with a deadline whose tokens take longer count as slow in
    /// the metrics. 0 sets no limit.
    #[arg(long, value_name = "MS", default_value_t = 0.0, help_heading = "Routing")]
    pub slo_tpot_ms: f64,
    /// Milliseconds after which a waiting request climbs one class: from low to normal, from normal to high.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Routing")]
    pub queue_ageing_ms: u64,
    /// Least shares of the dispatched tokens that the classes high, normal and low get while their requests wait: three
    /// numbers from 0 to 1, together 1 at most.
    #[arg(
        long,
        value_name = "H,N,L",
        action = ArgAction::Set,
        num_args = 1,
        value_delimiter = ',',
        default_value = "0.5,0.2,0.05",
        help_heading = "Routing"
    )]
    pub queue_floors: Vec<f64>,
    /// File to which each decision is written as a line of JSON, for `headrace sim --replay`. Without the flag none is
    /// written.
    #[arg(long, value_name = "PATH", help_heading = "Routing")]
    pub decision_log: Option<PathBuf>,
    /// Bytes of the decision log at most, together with the file before it, PATH.1. At least 65536.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, help_heading = "Routing")]
    pub decision_log_bytes: u64,

    /// File with the secret that workers must know to join, at least 8 bytes. The variable HEADRACE_SECRET holds the
    /// secret itself.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub secret_file: Option<PathBuf>,
    /// The secret itself, from the variable HEADRACE_SECRET.
    #[arg(skip = environment::one("HEADRACE_SECRET"))]
    pub secret: Option<String>,
    /// Let workers join without a secret, although other machines reach --worker-listen. Whoever reaches that address
    /// may then be sent prompts.
    #[arg(long, help_heading = "Security")]
    pub allow_anonymous_workers: bool,
    /// File with the keys of clients, one on a line: KEY, or TENANT KEY, so that several keys can belong to one tenant, and
    /// after the key what else it may, such as rpm=60. `headrace key new` writes such a line, without the key itself. Clients
    /// send a key as `Authorization: Bearer KEY`. Without keys everybody is served. The file is read again when it changes.
    /// The variable HEADRACE_API_KEY holds keys with commas between them.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub api_key_file: Option<PathBuf>,
    /// Keys of clients, from the variable HEADRACE_API_KEY.
    #[arg(skip = environment::several("HEADRACE_API_KEY"))]
    pub api_key: Vec<String>,
    /// Serve everybody, although other machines reach --host and there are no keys.
    #[arg(long, help_heading = "Security")]
    pub allow_anonymous_clients: bool,
    /// File with the keys of operators, one on a line, for /workers, drains and the decisions of all tenants. Without
    /// keys of operators and of clients, processes of this machine are operators. A key with only=metrics behind it may only
    /// read /metrics. The file is read again when it changes. The variable HEADRACE_ADMIN_KEY holds keys with commas between
    /// them.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub admin_key_file: Option<PathBuf>,
    /// Keys of operators, from the variable HEADRACE_ADMIN_KEY.
    #[arg(skip = environment::several("HEADRACE_ADMIN_KEY"))]
    pub admin_key: Vec<String>,
    /// Additional address for operators: unix:PATH, which only this user can open and which asks for no key, or
    /// HOST:PORT.
    #[arg(long, value_name = "ADDRESS", help_heading = "Security")]
    pub admin_listen: Vec<String>,
    /// Serve operators at the addresses of --admin-listen alone. The port of the clients has no /workers and no page then, no
    /// /metrics but with --public-metrics, and keys of operators are nobody's there.
    #[arg(long, help_heading = "Security")]
    pub admin_listen_only: bool,
    /// Show /metrics to everybody who reaches the port of the clients. Without the flag processes of this machine see it there,
    /// and whoever has a key of operators.
    #[arg(long, help_heading = "Security")]
    pub public_metrics: bool,
    /// Host names under which clients without a key reach this server, with commas between them, or * for any.
    /// Addresses, localhost, the name in --host and the names of this machine are always allowed. Web pages could use
    /// other names to reach this server.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Security")]
    pub allowed_hosts: Vec<String>,
    /// Web origins whose pages may send requests without a key and read the answers (CORS), such as
    /// https://chat.example.com, with commas between them, or * for any. The server's own origin is always allowed.
    #[arg(
        long,
        visible_alias = "cors-origin",
        value_name = "ORIGINS",
        value_delimiter = ',',
        help_heading = "Security"
    )]
    pub allowed_origins: Vec<String>,
    /// Whose requests share cached prompts: those of one tenant, or those of all. Without keys there is one tenant. The
    /// field `cache_salt` sets a request apart.
    #[arg(
        long,
        value_name = "WHO",
        default_value = "tenant",
        value_parser = ["tenant", "all"],
        help_heading = "Security"
    )]
    pub cache_sharing: String,
    /// Certificate chain (PEM) for TLS at the port of the clients. Needs --tls-key. Without both flags clients are served over
    /// plain HTTP. The files are read again when they change.
    #[arg(long, visible_alias = "tls-cert-path", value_name = "FILE", help_heading = "Security")]
    pub tls_cert: Option<PathBuf>,
    /// Private key (PEM) of --tls-cert.
    #[arg(long, visible_alias = "tls-key-path", value_name = "FILE", help_heading = "Security")]
    pub tls_key: Option<PathBuf>,
    /// Authorities (PEM) of which one must have signed the certificate that a client shows. Clients without such a
    /// certificate are refused. Without the flag clients need no certificate. Needs --tls-cert.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub tls_client_ca: Option<PathBuf>,
    /// Certificate chain (PEM) for TLS on the links of workers. Needs --worker-tls-key. Without both flags the links
    /// use no TLS. The files are read again when they change.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub worker_tls_cert: Option<PathBuf>,
    /// Private key (PEM) of --worker-tls-cert.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub worker_tls_key: Option<PathBuf>,
    /// Authorities (PEM) of which one must have signed the certificate that a worker shows. A worker with such a
    /// certificate needs no secret, unless there is one as well. Needs --worker-tls-cert.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub worker_tls_client_ca: Option<PathBuf>,

    /// Milliseconds that a request waits at most for a worker with room.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Deadlines")]
    pub queue_timeout_ms: u64,
    /// Milliseconds within which a request must be written to its worker.
    #[arg(long, value_name = "MS", default_value_t = 5_000, help_heading = "Deadlines")]
    pub submit_timeout_ms: u64,
    /// Milliseconds from the sending of a request to a worker to its first token. After that the request goes to
    /// another worker.
    #[arg(long, value_name = "MS", default_value_t = 300_000, help_heading = "Deadlines")]
    pub first_token_timeout_ms: u64,
    /// Milliseconds from one token to the next. After that the request goes on at another worker.
    #[arg(long, value_name = "MS", default_value_t = 60_000, help_heading = "Deadlines")]
    pub token_timeout_ms: u64,
    /// Milliseconds after which a client that reads nothing of its answer is cut off.
    #[arg(long, value_name = "MS", default_value_t = 60_000, help_heading = "Deadlines")]
    pub stall_timeout_ms: u64,
    /// Milliseconds from the arrival of a request to its last token.
    #[arg(long, value_name = "MS", default_value_t = 3_600_000, help_heading = "Deadlines")]
    pub request_timeout_ms: u64,
    /// Milliseconds within which the headers of a request must arrive, counted from their first byte. A connection that
    /// is kept for later requests may rest longer.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Deadlines")]
    pub header_timeout_ms: u64,
    /// Milliseconds within which the body of a request must arrive.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Deadlines")]
    pub body_timeout_ms: u64,
    /// Milliseconds that running answers may go on after a signal to stop.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Deadlines")]
    pub drain_timeout_ms: u64,

    /// Answers that may run at once. Each choice of a request with `n` counts.
    #[arg(long, value_name = "N", default_value_t = 16_384, help_heading = "Bounds")]
    pub max_streams: usize,
    /// Answers of one tenant that may run at once. A tenant is an API key's tenant, an X-Headrace-Tenant, or else an
    /// address. 0 sets no fixed bound: a tenant may then have seven times as many answers as are free, which is seven
    /// eighths of all where it is alone.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Bounds")]
    pub tenant_streams: usize,
    /// Connections of clients that may be open at once.
    #[arg(long, value_name = "N", default_value_t = MAX_CONNECTIONS, help_heading = "Bounds")]
    pub max_connections: usize,
    /// Bytes of the longest body of a request.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20, help_heading = "Bounds")]
    pub max_body_bytes: usize,
    /// Bytes of memory for all bodies of requests and for what is made of them until they are tokenised. One body may
    /// take 8 times --max-body-bytes and 4 MiB.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, help_heading = "Bounds")]
    pub max_body_memory_bytes: usize,
    /// Bytes of memory for all answers: text and log-probabilities until clients have read them, and stop strings. One
    /// answer may take half of it.
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20, help_heading = "Bounds")]
    pub max_answer_memory_bytes: usize,
    /// File in which responses of /v1/responses are kept over a restart, an SQLite database of this router alone. They are
    /// kept in memory where it is left out.
    #[arg(long, value_name = "FILE", help_heading = "Bounds")]
    pub response_store: Option<PathBuf>,
    /// Bytes of responses of /v1/responses that clients can ask for again or continue, in memory or in --response-store.
    /// One tenant may have half of it. 0 stores none.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, help_heading = "Bounds")]
    pub response_store_bytes: usize,
    /// Responses of one tenant that are stored. The least recently used ones make room for new ones.
    #[arg(long, value_name = "N", default_value_t = 4_096, help_heading = "Bounds")]
    pub tenant_responses: usize,
    /// Seconds for which a response is stored, counted from its last use.
    #[arg(long, value_name = "S", default_value_t = 86_400, help_heading = "Bounds")]
    pub response_ttl_s: u32,
    /// Answers that may wait for a worker with room.
    #[arg(long, value_name = "N", default_value_t = 4_096, help_heading = "Bounds")]
    pub queue_requests: usize,
    /// Prompt tokens that may wait for a worker with room.
    #[arg(long, value_name = "TOKENS", default_value_t = 16 << 20, help_heading = "Bounds")]
    pub queue_tokens: usize,
    /// Bytes of memory for requests that wait for a worker with room.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, help_heading = "Bounds")]
    pub queue_bytes: u64,
    /// Workers to try, after the first, before a request fails. The count restarts with every token received.
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Bounds")]
    pub retries: u32,

    /// How connections are spread over cores: `per-core`, each stays on the thread with the fewest, which costs less CPU and
    /// lets one that has much to do hold up its neighbours; `shared`, each runs on whichever thread is free.
    #[arg(long, default_value = "per-core", value_parser = ["per-core", "shared"])]
    pub runtime: String,
    /// Threads that render chat templates and tokenise. 0 takes one thread for every two cores.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Tokeniser")]
    pub tokenizer_threads: usize,
    /// Bytes of the longest stretch of text that the model's tokenizer cannot cut into pieces: letters without spaces,
    /// line breaks or punctuation, or any text where it is not known how the tokenizer splits words. Takes up to 350
    /// bytes of memory for each byte, for one such text at a time.
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = super::STRETCH_BYTES,
        help_heading = "Tokeniser"
    )]
    pub tokenizer_stretch_bytes: usize,
    /// Bytes of memory for tokenised beginnings of prompts, of all models together; half as much again is for the hashes of
    /// their blocks. 0 switches both caches off.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20, help_heading = "Tokeniser")]
    pub tokenizer_cache_bytes: usize,

    /// How models write tool calls. Without the flag each model's chat template shows it; /v1/models says what was found.
    #[arg(long, value_name = "NAME", value_parser = tool_parsers(), help_heading = "Answers")]
    pub tool_parser: Option<String>,
    /// How models mark reasoning, or none to send reasoning as part of the text. Without the flag each model's chat
    /// template shows it; /v1/models says what was found.
    #[arg(long, value_name = "NAME", value_parser = reasoning_parsers(), help_heading = "Answers")]
    pub reasoning_parser: Option<String>,

    /// What becomes of a parameter that nobody knows: refuse answers with a 400 that names it, warn ignores it, names it in
    /// the header X-Headrace-Ignored of the answer and counts it. Known parameters that are not supported are always
    /// refused.
    #[arg(
        long,
        value_name = "RULE",
        default_value = "refuse",
        value_parser = ["refuse", "warn"],
        help_heading = "Requests"
    )]
    pub unknown_parameters: String,
    /// Let chats bring their own template in the parameter chat_template. It runs under the bounds of any template.
    #[arg(long, help_heading = "Requests")]
    pub allow_request_templates: bool,

    /// Milliseconds between two signs of life of a worker, at most an hour. After three missed signs the requests of
    /// the worker go on elsewhere.
    #[arg(long, value_name = "MS", default_value_t = 1_000, help_heading = "Workers")]
    pub heartbeat_ms: u64,
    /// Milliseconds of silence after which a worker is dropped. More than three times --heartbeat-ms.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Workers")]
    pub heartbeat_timeout_ms: u64,
    /// Milliseconds after the first token for which a prefill worker keeps the KV of a prompt for the decode worker.
    #[arg(long, value_name = "MS", default_value_t = 30_000, help_heading = "Workers")]
    pub kv_lease_ms: u64,
    /// Milliseconds after the first token for which a decode worker waits for the KV of a prompt. After that it
    /// computes the prompt itself.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Deadlines")]
    pub transfer_timeout_ms: u64,
    /// Milliseconds within which a worker that dials must have introduced itself.
    #[arg(long, value_name = "MS", default_value_t = 10_000, help_heading = "Workers")]
    pub handshake_timeout_ms: u64,
    /// Milliseconds within which a connection to the workers' address must have sent its first byte.
    #[arg(long, value_name = "MS", default_value_t = 2_000, help_heading = "Workers")]
    pub first_byte_timeout_ms: u64,
    /// KV blocks in the index of cached prompts, for all workers together; a block takes up to 64 bytes. One worker
    /// gets at most an eighth; a worker that holds more serves without credit for its cache.
    #[arg(long, value_name = "N", default_value_t = 1 << 25, help_heading = "Bounds")]
    pub max_index_blocks: u64,
    /// Bytes of memory for the tokenizers and chat templates that workers send, of all models together.
    #[arg(long, value_name = "BYTES", default_value_t = 512 << 20, help_heading = "Bounds")]
    pub max_description_bytes: usize,
    /// Milliseconds within which a worker that joined must have said which blocks it holds, and within which a worker
    /// must send the tokenizer of its model.
    #[arg(long, value_name = "MS", default_value_t = 60_000, help_heading = "Workers")]
    pub describe_timeout_ms: u64,

    /// Broken links within a minute after which a worker is held off for a growing time. 0 holds no worker off.
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Workers")]
    pub circuit_breaks: u32,
    /// etcd in which this router registers, so that workers find it with `headrace worker --router etcd:...`:
    /// etcd:HOST:PORT[,HOST:PORT]/PREFIX. Without the flag the router does not register.
    #[arg(long, value_name = "ETCD", help_heading = "Workers")]
    pub register: Option<String>,
    /// Address at which registered workers reach this router. Needed where --worker-listen is not an address that can
    /// be dialled.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Workers")]
    pub advertise: Option<String>,
    /// Seconds after which etcd forgets a router that vanished, 2 to 3600.
    #[arg(long, value_name = "S", default_value_t = 10, help_heading = "Workers")]
    pub register_ttl_s: u32,

    /// How etcd is entered, from the variables HEADRACE_ETCD_CA, _CERT, _KEY, _USER and _PASSWORD.
    #[arg(skip = EtcdVariables::from_environment())]
    #[serde(skip)]
    pub etcd: EtcdVariables,
    /// What a service manager says in the variables LISTEN_..., NOTIFY_SOCKET and WATCHDOG_....
    #[arg(skip = ServiceVariables::from_environment())]
    #[serde(skip)]
    pub service: ServiceVariables,

    /// What is logged: error, warn (or warning), info, debug, trace, off, or a filter such as
    /// `info,headrace_router::fleet=debug`.
    #[arg(long, env = "HEADRACE_LOG", default_value = "info", help_heading = "Log")]
    pub log_level: String,
    /// Form of the log: lines of text, or lines of JSON.
    #[arg(long, default_value = "text", value_parser = ["text", "json"], help_heading = "Log")]
    pub log_format: String,
    /// Lines about requests a second, at most: of requests that finished, and as many of those that failed. What is left out
    /// is counted and told in the line of every ten seconds. 0 writes none.
    #[arg(long, default_value_t = 20, help_heading = "Log")]
    pub log_requests_per_s: u32,
    /// Adds the end of the prompt, 2,000 characters at most, to the lines about requests. Prompts are in no log otherwise.
    #[arg(long, help_heading = "Log")]
    pub log_prompts: bool,
    /// Show metrics under the names of another server, too, so that dashboards and gateways made for it work: `vllm`.
    #[arg(long, value_name = "SERVER", value_parser = [VLLM], help_heading = "Log")]
    pub metrics_compat: Option<String>,

    /// Collector of OpenTelemetry to which spans of requests are sent, as OTLP over HTTP: http://HOST:4318, to which
    /// /v1/traces is added. Without it there are no spans. The variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT holds a whole
    /// URL.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT", help_heading = "Traces")]
    pub otlp_endpoint: Option<String>,
    /// Share of requests that are traced, from 0 to 1, among those whose client says nothing of a trace. For others the
    /// flag in the client's traceparent decides.
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, help_heading = "Traces")]
    pub otlp_sample_ratio: f64,
    /// What the variables OTEL_... say besides.
    #[arg(skip = TracesVariables::from_environment())]
    #[serde(skip)]
    pub otlp: TracesVariables,
}

/// Whose names metrics can have.
pub(super) const VLLM: &str = "vllm";

fn policies() -> PossibleValuesParser {
    PolicyName::ALL.map(PolicyName::as_str).into()
}

fn tool_parsers() -> PossibleValuesParser {
    ToolParser::ALL.map(ToolParser::as_str).into()
}

fn reasoning_parsers() -> PossibleValuesParser {
    let names = ReasoningParser::ALL.into_iter().map(ReasoningParser::as_str);
    names.chain([NO_PARSER]).collect::<Vec<_>>().into()
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
