//! What those who dial the workers' port may take of the router before they are known, and what workers may announce.

use std::time::Duration;

use super::{ConfigError, RouterArgs, flag, millis};

/// Bounds on workers that dial in, as checked.
#[derive(Debug, Clone)]
pub struct FleetLimits {
    /// From the accepted connection to its first byte.
    pub first_byte: Duration,
    /// Blocks that the index keeps for all workers together.
    pub index_blocks: u64,
    /// Bytes of all models' descriptions.
    pub description_bytes: usize,
}

impl FleetLimits {
    pub(super) fn check(args: &RouterArgs) -> Result<Self, ConfigError> {
        if args.max_index_blocks > 1 << 36 {
            return Err(flag(
                "max-index-blocks",
                format!("is {}", args.max_index_blocks),
                "a block takes up to 64 bytes: at most 2^36, which is 4 TiB",
            ));
        }
        if args.max_description_bytes == 0 {
            return Err(flag(
                "max-description-bytes",
                "is 0".into(),
                "a model cannot be served without its description: at least the bytes of one",
            ));
        }
        Ok(Self {
            first_byte: millis("first-byte-timeout-ms", args.first_byte_timeout_ms)?,
            index_blocks: args.max_index_blocks,
            description_bytes: args.max_description_bytes,
        })
    }
}
