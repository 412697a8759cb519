//! What is kept of responses for their clients, checked.

use std::path::PathBuf;
use std::time::Duration;

use super::{ConfigError, RouterArgs, at_least_one, flag};

/// How much is kept of responses for their clients, and for how long.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Bytes of all of them; 0 keeps none.
    pub bytes: usize,
    /// Most responses of one tenant.
    pub tenant_responses: usize,
    /// From the last use.
    pub ttl: Duration,
    /// Where they are kept; in memory where there is none.
    pub file: Option<PathBuf>,
}

/// Below this hardly any response fits into a tenant's half.
const LEAST_BYTES: usize = 64 << 10;

impl StoreConfig {
    pub(super) fn check(args: &RouterArgs) -> Result<Self, ConfigError> {
        let bytes = args.response_store_bytes;
        if bytes > 0 && bytes < LEAST_BYTES {
            return Err(flag(
                "response-store-bytes",
                format!("is {bytes}"),
                &format!("it must be at least {LEAST_BYTES}, or 0 to keep no responses"),
            ));
        }
        let ttl = at_least_one("response-ttl-s", args.response_ttl_s as usize)?;
        Ok(Self {
            bytes,
            tenant_responses: at_least_one("tenant-responses", args.tenant_responses)?,
            ttl: Duration::from_secs(ttl as u64),
            file: file(args)?,
        })
    }
}

fn file(args: &RouterArgs) -> Result<Option<PathBuf>, ConfigError> {
    let Some(path) = &args.response_store else { return Ok(None) };
    if path.file_name().is_none() || path.is_dir() {
        let problem = format!("{} is not a file", path.display());
        return Err(flag("response-store", problem, "name a file in a directory that exists"));
    }
    if args.response_store_bytes == 0 {
        let problem = "is set, and --response-store-bytes is 0".to_owned();
        return Err(flag("response-store", problem, "leave one of them out"));
    }
    Ok(Some(path.clone()))
}
