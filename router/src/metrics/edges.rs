//! Who comes in: TLS, and files of keys and certificates that are read again.

use prometheus_client::encoding::EncodeLabelSet;

use super::kinds::labels::ByOutcome;
use super::kinds::{Gauge, Labelled, group};

group! {
    /// Who comes in: TLS, and files that are read again.
    Edges {
        tls_handshakes: Labelled<ByOutcome> = "headrace_tls_handshakes_total",
            "TLS handshakes of clients by how they ended.";
        tls_handshaking: Gauge = "headrace_tls_handshakes_open",
            "Connections of clients that have not agreed on TLS yet.";
        reloads: Labelled<ByReload> = "headrace_reloads_total",
            "Files of configuration, keys or certificates that were read again, by what they hold and whether they could be used.";
        reloads_refused: Gauge = "headrace_reloads_refused",
            "Kinds of files that cannot be used as they are now, so that what they said before counts on.";
    }
}

/// What files hold, and whether they could be used.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByReload {
    /// Such as `api_keys`.
    pub files: &'static str,
    /// `loaded` or `refused`.
    pub outcome: &'static str,
}
