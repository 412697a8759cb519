//! Errors about a request that was read as one of another API: they name the field that the client wrote.

use crate::error::RouteError;

/// What a field is called here, and what the client calls it.
pub(in crate::http) struct FieldNames {
    /// Whole paths, and the beginnings of longer ones.
    pub(in crate::http) beginnings: &'static [(&'static str, &'static str)],
    /// Parts of the paths of tools and their choice.
    pub(in crate::http) of_tools: &'static [(&'static str, &'static str)],
}

impl FieldNames {
    /// The error, about the client's own field.
    pub(in crate::http) fn of_client(&self, error: RouteError) -> RouteError {
        if let RouteError::BadRequest { param: Some(param), message } = error {
            let theirs = self.renamed(&param);
            let message = message.replace(&format!("`{param}`"), &format!("`{theirs}`"));
            return RouteError::BadRequest { param: Some(theirs), message };
        }
        error
    }

    fn renamed(&self, param: &str) -> String {
        if param.starts_with("tool") {
            let found = self.of_tools.iter().find(|(ours, _)| param.contains(ours));
            return found.map_or_else(
                || param.to_owned(),
                |(ours, theirs)| param.replacen(ours, theirs, 1),
            );
        }
        let of_client = self.beginnings.iter().find_map(|(ours, theirs)| {
            let rest = param.strip_prefix(ours)?;
            (rest.is_empty() || rest.starts_with(['.', '['])).then(|| format!("{theirs}{rest}"))
        });
        of_client.unwrap_or_else(|| param.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse::fields::bad;

    #[test]
    fn an_error_names_what_the_client_wrote() {
        let names = FieldNames {
            beginnings: &[("stop", "stop_sequences"), ("a.b", "c")],
            of_tools: &[(".function.parameters", ".input_schema"), (".function", "")],
        };
        for (ours, theirs) in [
            ("stop", "stop_sequences"),
            ("stop[3]", "stop_sequences[3]"),
            ("stop_token_ids", "stop_token_ids"),
            ("a.b.x", "c.x"),
            ("tools[1].function.parameters.x", "tools[1].input_schema.x"),
            ("tool_choice.function.name", "tool_choice.name"),
            ("tools[0]", "tools[0]"),
        ] {
            let error = names.of_client(bad(ours, format!("`{ours}` is wrong, unlike `other`")));
            let RouteError::BadRequest { param, message } = error else { panic!("{error}") };
            assert_eq!(param.as_deref(), Some(theirs));
            assert_eq!(message, format!("`{theirs}` is wrong, unlike `other`"));
        }
    }
}
