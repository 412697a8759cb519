//! Tools for models whose chat template knows none: told in a system message, in the way of Hermes, and so is their history.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::error::RouteError;
use crate::limits::memory::MemoryShare;

/// Writes the tools into the first system message, or into a new one, and calls and results into the text of messages.
///
/// # Errors
/// `BodyTooComplex` or `Overloaded` if there is no memory for it.
pub(super) fn show(
    messages: &mut Vec<Value>,
    tools: &[Value],
    memory: &mut MemoryShare,
) -> Result<(), RouteError> {
    let mut told = String::from(
        "# Tools\n\nYou may call functions to help with the question. These are the functions that there are:\n<tools>\n",
    );
    for tool in tools {
        writeln!(told, "{tool}").map_err(|error| RouteError::internal("writing tools", error))?;
    }
    told.push_str(
        "</tools>\n\nTo call a function, answer with its name and its arguments as JSON, like this:\n\
         <tool_call>\n{\"name\": \"the function\", \"arguments\": {\"an argument\": \"its value\"}}\n</tool_call>",
    );
    memory.charge(2 * told.len()).map_err(|refused| refused.body(Some("tools".to_owned())))?;
    match messages.first_mut() {
        Some(first) if first["role"] == "system" => {
            let text = first["content"].as_str().unwrap_or_default();
            let text = if text.is_empty() { told } else { format!("{text}\n\n{told}") };
            first["content"] = text.into();
        }
        _ => messages.insert(0, json!({"role": "system", "content": told})),
    }
    Ok(())
}

/// Calls and their results as text, where a template would not show them.
///
/// # Errors
/// `BodyTooComplex` or `Overloaded` if there is no memory for it.
pub(super) fn retell(
    messages: &mut Vec<Value>,
    memory: &mut MemoryShare,
) -> Result<(), RouteError> {
    if !messages.iter().any(|one| one["role"] == "tool" || one.get("tool_calls").is_some()) {
        return Ok(());
    }
    let names = called(messages);
    let mut told: Vec<Value> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for mut message in messages.drain(..) {
        let is_result = message["role"] == "tool";
        let content = message["content"].as_str().unwrap_or_default();
        if is_result {
            // in words: a model that was never trained on tools copies the tags of a format instead of reading them
            let name = message["tool_call_id"].as_str().and_then(|id| names.get(id));
            let text = match name {
                Some(name) => format!("The tool {name} answered: {content}"),
                None => format!("A tool answered: {content}"),
            };
            memory.charge(2 * text.len()).map_err(|refused| refused.body(None))?;
            match told.last_mut().filter(|_| after_result).map(|last| &mut last["content"]) {
                Some(Value::String(results)) => {
                    results.push('\n');
                    results.push_str(&text);
                }
                _ => told.push(json!({"role": "user", "content": text})),
            }
        } else {
            if let Some(Value::Array(calls)) = message
                .as_object_mut()
                .and_then(|fields: &mut Map<_, _>| fields.remove("tool_calls"))
            {
                let mut text = message["content"].as_str().unwrap_or_default().to_owned();
                for call in calls {
                    let function = &call["function"];
                    let call =
                        json!({"name": function["name"], "arguments": function["arguments"]});
                    let line_break = if text.is_empty() { "" } else { "\n" };
                    write!(text, "{line_break}<tool_call>\n{call}\n</tool_call>")
                        .map_err(|error| RouteError::internal("writing calls", error))?;
                }
                memory.charge(2 * text.len()).map_err(|refused| refused.body(None))?;
                message["content"] = text.into();
            }
            told.push(message);
        }
        after_result = is_result;
    }
    *messages = told;
    Ok(())
}

/// The names of the functions that were called, by the ids of the calls.
fn called(messages: &[Value]) -> HashMap<String, String> {
    let calls = messages.iter().filter_map(|message| message["tool_calls"].as_array()).flatten();
    calls
        .filter_map(|call| Some((call["id"].as_str()?, call["function"]["name"].as_str()?)))
        .map(|(id, name)| (id.to_owned(), name.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::memory::MemoryPool;

    #[test]
    fn tools_are_told_and_calls_and_results_are_text() {
        let mut memory = MemoryPool::private(1 << 20).share();
        let call = |name: &str| json!({"id": name, "type": "function", "function": {"name": name, "arguments": {"a": 1}}});
        let mut messages = vec![
            json!({"role": "user", "content": "hi"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call("f"), call("g")]}),
            json!({"role": "tool", "content": "1", "tool_call_id": "g"}),
            json!({"role": "tool", "content": "2", "tool_call_id": "another"}),
        ];
        retell(&mut messages, &mut memory).unwrap();
        let f = "<tool_call>\n{\"arguments\":{\"a\":1},\"name\":\"f\"}\n</tool_call>";
        let text = messages[1]["content"].as_str().unwrap();
        let named = |text: &str| text.contains("\"name\":\"f\"") && text.contains("\"a\":1");
        assert!(named(text) && text.len() == 2 * f.len() + 1, "{text}");
        let results = "The tool g answered: 1\nA tool answered: 2";
        assert_eq!(messages[2..], [json!({"role": "user", "content": results})]);

        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        show(&mut messages, &tools, &mut memory).unwrap();
        assert_eq!(messages[0]["role"], "system");
        let alone = messages[0]["content"].as_str().unwrap().to_owned();
        assert!(alone.contains("\n<tools>\n{") && alone.contains("<tool_call>"));
        let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
        show(&mut messages, &tools, &mut memory).unwrap();
        assert_eq!(
            messages,
            [json!({"role": "system", "content": format!("Be brief.\n\n{alone}")})]
        );
    }
}
