//! Which items the messages of a chat were made of, for errors about them.

use crate::error::RouteError;

/// For each message, in its order, where it comes from.
#[derive(Debug, Default)]
pub(in crate::http::responses) struct MessageOrigins(Vec<MessageOrigin>);

/// Paths of items in the request.
#[derive(Debug, Default)]
pub(super) struct MessageOrigin {
    /// The first item of the message.
    first: Option<String>,
    /// Those of its calls.
    calls: Vec<String>,
}

impl MessageOrigin {
    pub(super) fn note(&mut self, at: &str) {
        self.first.get_or_insert_with(|| at.to_owned());
    }

    pub(super) fn note_call(&mut self, at: &str) {
        self.note(at);
        self.calls.push(at.to_owned());
    }
}

impl MessageOrigins {
    pub(super) fn push(&mut self, origin: MessageOrigin) {
        self.0.push(origin);
    }

    /// The error, about an item where it is about a message.
    pub(in crate::http::responses) fn of_client(&self, error: RouteError) -> RouteError {
        let RouteError::BadRequest { param: Some(param), message } = error else { return error };
        let theirs = self.path(&param).unwrap_or_else(|| param.clone());
        let message = message.replace(&format!("`{param}`"), &format!("`{theirs}`"));
        RouteError::BadRequest { param: Some(theirs), message }
    }

    fn path(&self, param: &str) -> Option<String> {
        let (at, rest) = param.strip_prefix("messages[")?.split_once(']')?;
        let origin = self.0.get(at.parse::<usize>().ok()?)?;
        let call = rest.strip_prefix(".tool_calls[").and_then(|rest| {
            let (at, rest) = rest.split_once(']')?;
            let call = origin.calls.get(at.parse::<usize>().ok()?)?;
            Some(format!("{call}{}", rest.strip_prefix(".function").unwrap_or(rest)))
        });
        call.or_else(|| origin.first.clone())
    }
}
