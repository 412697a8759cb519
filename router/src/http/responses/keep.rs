//! What a response becomes when it has ended: its whole object, which is stored where it was to be.

use std::sync::Arc;

use bytes::Bytes;

use crate::http::reply::blocks::Block;
use crate::http::responses::ids::ResponseIds;
use crate::http::responses::object::{self, ItemExtras, ResponseStatus};
use crate::request::Usage;
use crate::response_store::{OwnerId, ResponseStore, StoredResponse};

/// Makes the whole object of one response.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) ids: ResponseIds,
    /// The object up to its output.
    pub(super) head: Bytes,
    /// The list of its input items.
    pub(super) input: Bytes,
    pub(super) previous: Option<String>,
    pub(super) extras: ItemExtras,
    /// Where it is stored, and whose it is.
    pub(super) store: Option<(ResponseStore, OwnerId)>,
}

impl Keeper {
    /// The list of all output items.
    pub(super) fn output(&self, blocks: &[Block], status: ResponseStatus) -> Bytes {
        object::output(blocks, &self.ids, status, &self.extras)
    }

    /// The response that ended, after it was stored.
    pub(super) fn finish(
        &mut self,
        blocks: &[Block],
        status: ResponseStatus,
        usage: Usage,
    ) -> Arc<StoredResponse> {
        let response = Arc::new(StoredResponse {
            head: self.head.clone(),
            output: self.output(blocks, status),
            tail: object::tail(status, Some(usage), None),
            input: std::mem::take(&mut self.input),
            previous: self.previous.take(),
            _memory: None,
        });
        if let Some((store, owner)) = &self.store {
            store.put(*owner, &self.ids.response(), Arc::clone(&response));
        }
        response
    }
}
