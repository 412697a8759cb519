//! What the response says again of its request.

use serde_json::Value;

use crate::error::RouteError;
use crate::limits::memory::{MemoryShare, Refused};

/// Fields of the response, as far as they are known.
pub(super) struct RequestEcho<'m> {
    pub(super) text: String,
    instructions: Option<String>,
    pub(super) memory: &'m mut MemoryShare,
}

impl<'m> RequestEcho<'m> {
    pub(super) fn new(memory: &'m mut MemoryShare) -> Self {
        Self { text: String::new(), instructions: None, memory }
    }

    pub(super) fn copy(&mut self, name: &str, value: Option<&Value>) -> Result<(), RouteError> {
        let text = value.map_or_else(|| "null".to_owned(), Value::to_string);
        // a string doubles, and it is said in the first two events and in the last
        self.memory.charge(4 * (text.len() + name.len() + 4)).map_err(Refused::answer)?;
        if name == "instructions" {
            self.instructions = value.and_then(Value::as_str).map(str::to_owned);
        }
        if !self.text.is_empty() {
            self.text.push(',');
        }
        self.text.push('"');
        self.text.push_str(name);
        self.text.push_str("\":");
        self.text.push_str(&text);
        Ok(())
    }

    pub(super) fn instructions(&mut self) -> Option<String> {
        self.instructions.take()
    }
}
