//! The keys by which the blocks of a prompt are known in the fleet.

use std::num::NonZeroUsize;
use std::sync::Arc;

use super::Registry;
use crate::core::blocks::{BlockHash, ChainMemo};
use crate::core::secret::HashKey;
use crate::error::RouteError;

/// Prompts of more tokens are hashed away from the threads that serve the sockets. A guess: to hash so many takes 0.1 ms, and to hand
/// them to another thread and back a good part of that.
const HASHED_INLINE: usize = 16_384;

impl Registry {
    /// Keys of the full blocks of a prompt.
    ///
    /// # Errors
    /// `Overloaded`, `ShuttingDown`: long prompts are hashed by the threads of the tokeniser.
    pub(crate) async fn block_keys(
        &self,
        block_tokens: u32,
        ids: &Arc<Vec<u32>>,
        salt: &[u8],
    ) -> Result<Arc<[u64]>, RouteError> {
        if ids.len() <= HASHED_INLINE {
            return Ok(self.block_keys_now(block_tokens, ids, salt));
        }
        let (key, memo) = (self.setup.hash_key, Arc::clone(&self.setup.chain_memo));
        let (ids, salt) = (Arc::clone(ids), salt.to_vec());
        let hash = move || block_keys(&memo, &key, block_tokens, &ids, &salt);
        self.setup.tokenize_pool.run(hash).await
    }

    /// The same on this thread, however long it is.
    pub(crate) fn block_keys_now(&self, block_tokens: u32, ids: &[u32], salt: &[u8]) -> Arc<[u64]> {
        block_keys(&self.setup.chain_memo, &self.setup.hash_key, block_tokens, ids, salt)
    }
}

fn block_keys(
    memo: &ChainMemo,
    key: &HashKey,
    block_tokens: u32,
    ids: &[u32],
    salt: &[u8],
) -> Arc<[u64]> {
    let Some(block_tokens) = NonZeroUsize::new(block_tokens as usize) else { return [].into() };
    let hashes = memo.hash_blocks(key, BlockHash::root(key, salt), ids, block_tokens);
    hashes.into_iter().map(|hash| hash.key().0).collect()
}
