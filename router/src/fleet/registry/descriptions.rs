//! Descriptions of models: who has one, who is asked for one, and what a complete one changes.

use std::sync::Arc;

use super::{Registry, RegistryState};
use crate::fleet::link::{Description, Link, LinkError};
use crate::fleet::pool::{Described, document};
use crate::prompt::{ModelDoc, PromptEngine, PromptError};

impl Registry {
    /// The description of a model is complete.
    pub(in crate::fleet) fn described(self: &Arc<Self>, link: Arc<Link>, description: Description) {
        let Description { fingerprint, document, charge, .. } = description;
        let registry = Arc::clone(self);
        let pool = Arc::clone(&self.setup.tokenize_pool);
        let cache = Arc::clone(&self.setup.prefix_cache);
        let stretch_bytes = self.setup.config.tokenizer.stretch_bytes;
        tokio::spawn(async move {
            let read = move || -> Result<PromptEngine, PromptError> {
                PromptEngine::with_cache(ModelDoc::parse(&document)?, pool, cache, stretch_bytes)
            };
            match tokio::task::spawn_blocking(read).await {
                Ok(Ok(engine)) => {
                    registry.add_engine(&fingerprint, &(Arc::new(engine), Arc::new(charge)));
                }
                Ok(Err(error)) => link.close(LinkError::ModelOfNoUse(error)),
                Err(error) => link.close(LinkError::ModelUnread(error)),
            }
        });
    }

    fn add_engine(self: &Arc<Self>, fingerprint: &str, described: &Described) {
        let mut state = self.state();
        let mut changed = Vec::new();
        for pool in state.pools.values_mut() {
            // described twice if the first to be asked left in between: those who wait hold tokens of the first engine
            if pool.engine.is_none() && document(&pool.fingerprints) == fingerprint {
                pool.set_engine(described.clone());
                changed.push(pool.model.clone());
            }
        }
        for model in changed {
            self.dispatch_waiting(&mut state, &model);
        }
    }
}

impl RegistryState {
    pub(super) fn described(&self, fingerprint: &str) -> Option<Described> {
        let mut pools = self.pools.values();
        pools.find_map(|pool| {
            pool.described().filter(|_| document(&pool.fingerprints) == fingerprint)
        })
    }

    pub(super) fn somebody_describes(&self, fingerprint: &str) -> bool {
        self.pools.values().any(|pool| {
            document(&pool.fingerprints) == fingerprint && pool.workers().any(|worker| worker.asked)
        })
    }
}
