//! What a client can ask next with what an answer says, for programs that walk through the document.

use serde_json::json;
use serde_json::{Map, Value};

/// A name that later requests take: the operations that take it, their parameter, and where the answer has it.
type Name = (&'static [&'static str], &'static str, &'static str);

const RESPONSE: Name = (
    &["response", "response_input", "cancel_response", "delete_response"],
    "response",
    "$response.body#/id",
);
const DECISIONS: Name = (&["decisions"], "request", "$response.header.X-Request-ID");
const MODEL: Name = (&["model", "tokenizer_info_of"], "name", "$response.body#/data/0/id");
/// The operation that asks a worker to leave is no step of a walk.
const WORKER: Name = (&["drain_state"], "worker", "$response.body#/workers/0/name");

/// `links` of the answer to an operation, by its id.
pub(super) fn of(id: &str) -> Option<Value> {
    let names: &[Name] = match id {
        "respond" => &[RESPONSE, DECISIONS],
        "chat" | "complete" | "message" | "embed" => &[DECISIONS],
        "models" => &[MODEL],
        "workers" => &[WORKER],
        _ => return None,
    };
    let mut links = Map::new();
    for (operations, parameter, value) in names {
        for operation in *operations {
            let link = json!({"operationId": operation, "parameters": {*parameter: value}});
            links.insert((*operation).to_owned(), link);
        }
    }
    Some(links.into())
}
