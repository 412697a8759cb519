//! Parameters of a chat that go to its template, and a template of its own.

use serde_json::Value;

use crate::config::HttpConfig;
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, unsupported, wrong_type};
use crate::prompt::ChatPrompt;

/// Longest template of a request. Those of large models have some 20 KB. A guess.
const MAX_TEMPLATE_BYTES: usize = 64 << 10;
/// Documents of one chat. A guess; the body bounds their text.
const MAX_DOCUMENTS: usize = 1024;

/// Takes them out of `fields`.
///
/// # Errors
/// `BadRequest` about the first wrong one.
pub(in crate::http) fn take(fields: &mut Fields, chat: &mut ChatPrompt) -> Result<(), RouteError> {
    documents(fields, chat)?;
    verbosity(fields, chat)?;
    chat.add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(false);
    chat.template = fields.string("chat_template")?;
    match &chat.template {
        Some(template) if template.len() > MAX_TEMPLATE_BYTES => {
            let len = template.len();
            let message =
                format!("`chat_template` has {len} bytes, the limit is {MAX_TEMPLATE_BYTES}");
            Err(bad("chat_template", message))
        }
        Some(_) | None => Ok(()),
    }
}

/// Refuses a template of the request's own where operators did not allow them.
///
/// # Errors
/// `BadRequest` about `chat_template`.
pub(in crate::http) fn allowed(chat: &ChatPrompt, config: &HttpConfig) -> Result<(), RouteError> {
    if chat.template.is_some() && !config.request_templates {
        let why = "the model's own template is used; --allow-request-templates lets requests bring theirs";
        return Err(unsupported("chat_template", why));
    }
    Ok(())
}

/// What the answer is to rely on: a list of objects that the template shows to the model.
fn documents(fields: &mut Fields, chat: &mut ChatPrompt) -> Result<(), RouteError> {
    let Some(documents) = fields.array("documents")? else { return Ok(()) };
    if documents.len() > MAX_DOCUMENTS {
        let message = format!(
            "`documents` holds {} documents, the limit is {MAX_DOCUMENTS}",
            documents.len()
        );
        return Err(bad("documents", message));
    }
    if let Some(at) = documents.iter().position(|document| !document.is_object()) {
        return Err(wrong_type(format!("documents[{at}]"), "an object", &documents[at]));
    }
    if !documents.is_empty() {
        put(chat, "documents", Value::Array(documents))?;
        chat.asked.push("documents");
    }
    Ok(())
}

/// How much the model is to say. `medium` is what a model does that knows nothing of it.
fn verbosity(fields: &mut Fields, chat: &mut ChatPrompt) -> Result<(), RouteError> {
    let Some(verbosity) = fields.string("verbosity")? else { return Ok(()) };
    if !["low", "medium", "high"].contains(&verbosity.as_str()) {
        return Err(bad("verbosity", "`verbosity` must be \"low\", \"medium\" or \"high\""));
    }
    if verbosity != "medium" {
        chat.asked.push("verbosity");
    }
    put(chat, "verbosity", Value::String(verbosity))
}

fn put(chat: &mut ChatPrompt, name: &str, value: Value) -> Result<(), RouteError> {
    if chat.template_kwargs.insert(name.to_owned(), value).is_some() {
        let message = format!("`{name}` stands in `chat_template_kwargs`, too; send one of them");
        return Err(bad(name, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn taken(body: Value) -> Result<ChatPrompt, RouteError> {
        let mut fields = Fields::of_body(body)?;
        let mut chat = ChatPrompt::default();
        if let Some(kwargs) = fields.object("chat_template_kwargs")? {
            chat.template_kwargs = kwargs.into_rest();
        }
        take(&mut fields, &mut chat)?;
        Ok(chat)
    }

    #[test]
    fn they_become_variables_of_the_template() {
        let chat = taken(json!({"documents": [{"title": "t"}], "verbosity": "low"})).unwrap();
        assert_eq!(chat.asked, ["documents", "verbosity"]);
        assert_eq!(chat.template_kwargs["documents"], json!([{"title": "t"}]));
        let nothing = taken(json!({"documents": [], "verbosity": "medium"})).unwrap();
        assert!(nothing.asked.is_empty() && !nothing.template_kwargs.contains_key("documents"));
    }

    #[test]
    fn wrong_ones_are_named() {
        for (param, body) in [
            ("documents", json!({"documents": "x"})),
            ("documents[1]", json!({"documents": [{}, "x"]})),
            ("documents", json!({"documents": vec![json!({}); 1025]})),
            ("documents", json!({"documents": [{}], "chat_template_kwargs": {"documents": []}})),
            ("verbosity", json!({"verbosity": "loud"})),
            ("verbosity", json!({"verbosity": 3})),
            ("add_special_tokens", json!({"add_special_tokens": "no"})),
            ("chat_template", json!({"chat_template": 5})),
            ("chat_template", json!({"chat_template": "x".repeat(70_000)})),
        ] {
            match taken(body) {
                Err(RouteError::BadRequest { param: got, .. }) => {
                    assert_eq!(got.as_deref(), Some(param));
                }
                other => panic!("{param}: {other:?}"),
            }
        }
    }
}
