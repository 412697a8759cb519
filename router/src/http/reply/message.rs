//! The message of a chat answer whose text was told apart: what it says, what it thought, what it calls.

use bytes::BytesMut;

use crate::http::reply::events::json;
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare, Refused};
use crate::output::Part;

/// The parts of one choice, put together.
#[derive(Debug, Default)]
pub(in crate::http) struct Message {
    pub(in crate::http) content: String,
    pub(in crate::http) reasoning: String,
    pub(in crate::http) calls: Vec<ToolCall>,
}

/// A call of a function.
#[derive(Debug)]
pub(in crate::http) struct ToolCall {
    pub(in crate::http) id: String,
    pub(in crate::http) name: String,
    /// JSON, unless the answer was cut.
    pub(in crate::http) arguments: String,
}

impl Message {
    /// # Errors
    /// There is no memory for it.
    pub(in crate::http) fn push(
        &mut self,
        part: Part,
        memory: &mut MemoryShare,
    ) -> Result<(), Refused> {
        // strings and lists double
        match part {
            Part::Content(text) => {
                memory.charge(2 * text.len())?;
                self.content.push_str(&text);
            }
            Part::Reasoning(text) => {
                memory.charge(2 * text.len())?;
                self.reasoning.push_str(&text);
            }
            Part::CallBegins { id, name, .. } => {
                let texts = id.len() + name.len() + 3 * ALLOCATION_BYTES;
                memory.charge(2 * size_of::<ToolCall>() + texts)?;
                self.calls.push(ToolCall { id, name, arguments: String::new() });
            }
            Part::CallArguments { text, .. } => {
                memory.charge(2 * text.len())?;
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
        }
        Ok(())
    }

    /// Appends the message, as OpenAI has it; with the reasoning under both names that clients know.
    pub(in crate::http) fn write(&self, shows_reasoning: bool, out: &mut BytesMut) {
        let reasoning = Some(&self.reasoning).filter(|text| shows_reasoning && !text.is_empty());
        out.extend_from_slice(b"{\"role\":\"assistant\",\"content\":");
        if self.content.is_empty() && (reasoning.is_some() || !self.calls.is_empty()) {
            out.extend_from_slice(b"null");
        } else {
            json(out, &self.content);
        }
        out.extend_from_slice(b",\"refusal\":null");
        if let Some(reasoning) = reasoning {
            write_reasoning(reasoning, b",", out);
        }
        for (place, call) in self.calls.iter().enumerate() {
            out.extend_from_slice(if place == 0 {
                b",\"tool_calls\":[{\"id\":"
            } else {
                b",{\"id\":"
            });
            json(out, &call.id);
            write_function(&call.name, &call.arguments, out);
            out.extend_from_slice(b"}");
        }
        out.extend_from_slice(if self.calls.is_empty() { b"}" } else { b"]}" });
    }
}

/// Appends reasoning under both of its names.
pub(in crate::http) fn write_reasoning(text: &str, before: &[u8], out: &mut BytesMut) {
    out.extend_from_slice(before);
    out.extend_from_slice(b"\"reasoning_content\":");
    json(out, text);
    out.extend_from_slice(b",\"reasoning\":");
    json(out, text);
}

/// Appends what a call is of, after its id.
pub(in crate::http) fn write_function(name: &str, arguments: &str, out: &mut BytesMut) {
    out.extend_from_slice(b",\"type\":\"function\",\"function\":{\"name\":");
    json(out, name);
    out.extend_from_slice(b",\"arguments\":");
    json(out, arguments);
    out.extend_from_slice(b"}");
}
