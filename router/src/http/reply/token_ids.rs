//! Token ids in an answer, for `return_token_ids`.

use bytes::BytesMut;

use crate::http::reply::events::number;

/// Of the prompt: of a chat's answer as a whole, of each choice of a plain one.
pub(in crate::http) const OF_PROMPT: &[u8] = b",\"prompt_token_ids\":";
/// Of a choice, or of a part of it.
pub(in crate::http) const OF_CHOICE: &[u8] = b",\"token_ids\":";

/// Appends a field with ids, where there are any to be sent. `name` begins with a comma.
pub(in crate::http) fn field(name: &[u8], ids: Option<&[u32]>, out: &mut BytesMut) {
    let Some(ids) = ids else { return };
    out.extend_from_slice(name);
    out.extend_from_slice(b"[");
    for (i, id) in ids.iter().enumerate() {
        if i > 0 {
            out.extend_from_slice(b",");
        }
        number(out, *id);
    }
    out.extend_from_slice(b"]");
}
