//! One chunk of a chat answer in a stream: the envelope around a delta, and the delta of each part.

use bytes::BytesMut;

use crate::http::reply::events::{Envelope, json, number};
use crate::http::reply::message;
use crate::output::Part;
use crate::request::Usage;

/// What opens a message, up to its reason to end.
pub(super) const ROLE: &[u8] = b"{\"role\":\"assistant\",\"content\":\"\",\"refusal\":null},\
    \"logprobs\":null,\"finish_reason\":null";
/// The same for a message of calls alone.
pub(super) const ROLE_OF_CALLS: &[u8] =
    b"{\"role\":\"assistant\",\"content\":null,\"refusal\":null},\
    \"logprobs\":null,\"finish_reason\":null";

/// Appends the `delta` of a part.
pub(super) fn write_part(part: &Part, out: &mut BytesMut) {
    match part {
        Part::Content(text) => {
            out.extend_from_slice(b"{\"content\":");
            json(out, text);
            out.extend_from_slice(b"}");
        }
        Part::Reasoning(text) => {
            message::write_reasoning(text, b"{", out);
            out.extend_from_slice(b"}");
        }
        Part::CallBegins { index, id, name } => {
            out.extend_from_slice(b"{\"tool_calls\":[{\"index\":");
            number(out, *index);
            out.extend_from_slice(b",\"id\":");
            json(out, id);
            message::write_function(name, "", out);
            out.extend_from_slice(b"}]}");
        }
        Part::CallArguments { index, text } => {
            out.extend_from_slice(b"{\"tool_calls\":[{\"index\":");
            number(out, *index);
            out.extend_from_slice(b",\"function\":{\"arguments\":");
            json(out, text);
            out.extend_from_slice(b"}}]}");
        }
    }
}

/// What the events of one delta share.
pub(super) struct ChatChunk<'a> {
    pub(super) choice: u32,
    pub(super) usage: Usage,
    pub(super) envelope: &'a Envelope,
}

impl ChatChunk<'_> {
    pub(super) fn write(&self, out: &mut BytesMut, fields: impl FnOnce(&mut BytesMut)) {
        self.write_with(None, out, fields);
    }

    pub(super) fn write_with(
        &self,
        prompt_ids: Option<&[u32]>,
        out: &mut BytesMut,
        fields: impl FnOnce(&mut BytesMut),
    ) {
        self.envelope.open(out);
        out.extend_from_slice(b"{\"index\":");
        number(out, self.choice);
        out.extend_from_slice(b",\"delta\":");
        fields(out);
        out.extend_from_slice(b"}");
        self.envelope.close_with(prompt_ids, self.usage, out);
    }

    pub(super) fn end(&self, reason: &str, out: &mut BytesMut) {
        self.write(out, |out| {
            out.extend_from_slice(b"{},\"logprobs\":null,\"finish_reason\":");
            json(out, reason);
        });
    }
}
