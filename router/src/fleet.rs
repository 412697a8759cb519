//! The workers: their links, what they said of themselves, and their load.

pub mod codec;

use std::sync::Arc;

use crate::config::{Config, WorkerListen};
use crate::metrics::Metrics;

/// The way to reach the workers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Fleet {
    address: WorkerListen,
}

/// Why the router could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Which.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// Certificate or key cannot be used.
    #[error("cannot use the certificate {path}: {reason}")]
    Tls {
        /// Which file.
        path: String,
        /// Why.
        reason: String,
    },
}

/// A model that can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// As clients write it.
    pub name: String,
    /// Longest sequence that every one of its workers takes.
    pub context_tokens: u32,
    /// Seconds since 1970 at which its first worker joined.
    pub created: u64,
}

impl Fleet {
    pub(crate) async fn start(config: &Config, _metrics: Arc<Metrics>) -> Result<Self, StartError> {
        Ok(Self { address: config.fleet.listen.clone() })
    }

    /// Where workers dial in, with the port that was taken.
    #[must_use]
    pub fn address(&self) -> &WorkerListen {
        &self.address
    }

    /// Models with a worker that can serve them.
    #[must_use]
    pub fn models(&self) -> Vec<ModelInfo> {
        Vec::new()
    }

    /// Tokenizer and template of a model.
    #[must_use]
    pub fn engine(&self, _model: &str) -> Option<Arc<crate::prompt::PromptEngine>> {
        None
    }

    /// The body of `/workers`.
    #[must_use]
    pub fn workers(&self) -> serde_json::Value {
        serde_json::json!({"workers": []})
    }

    /// At least one worker takes new work, and the router is not shutting down.
    #[must_use]
    pub fn ready(&self) -> bool {
        false
    }
}
