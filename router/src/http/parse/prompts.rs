//! Prompts that are texts or lists of token ids, one or several.

use crate::error::RouteError;
use crate::http::parse::fields::{bad, kind, wrong_type};
use crate::http::parse::token_ids::{IdList, Ids, IdsField, Several};
use crate::prompt::Prompt;

/// A string, an array of strings, an array of token ids, or an array of arrays of token ids.
///
/// # Errors
/// `BadRequest` about the first that is wrong.
pub(in crate::http) fn prompts(
    field: IdsField,
    prompt: Ids,
    vocab_size: u32,
) -> Result<Vec<Prompt>, RouteError> {
    let IdsField { name, most } = field;
    let ids = |ids: IdList, param: &str| {
        if ids.is_empty() {
            return Err(bad(param, format!("`{param}` must hold at least one token id")));
        }
        ids.check(param, vocab_size).map(Prompt::Tokens)
    };
    match prompt {
        Ids::Text(text) => Ok(vec![Prompt::Text(text)]),
        Ids::List(list) if list.is_empty() => {
            Err(bad(name, format!("`{name}` must not be an empty array")))
        }
        Ids::List(list) => Ok(vec![ids(list, name)?]),
        Ids::Texts(Several { len, .. })
        | Ids::Lists(Several { len, .. })
        | Ids::Odd { len, .. }
            if len > most =>
        {
            Err(bad(name, format!("`{name}` holds {len} prompts, the limit is {most}")))
        }
        Ids::Texts(texts) => match texts.odd {
            None => Ok(texts.items.into_iter().map(Prompt::Text).collect()),
            Some((at, odd)) => {
                Err(wrong_type(format!("{name}[{at}]"), "a string like the first", &odd))
            }
        },
        Ids::Lists(lists) => {
            let prompts = lists.items.into_iter().enumerate();
            let prompts = prompts.map(|(i, list)| ids(list, &format!("{name}[{i}]")));
            let prompts = prompts.collect::<Result<_, _>>()?;
            match lists.odd {
                None => Ok(prompts),
                Some((at, odd)) => {
                    Err(wrong_type(format!("{name}[{at}]"), "an array like the first", &odd))
                }
            }
        }
        Ids::Odd { first, .. } => {
            let message = format!(
                "`{name}[0]` must be a string, a token id or an array, not {}",
                kind(&first)
            );
            Err(bad(format!("{name}[0]"), message))
        }
        Ids::Other(other) => {
            Err(wrong_type(name, "a string or an array of strings or token ids", &other))
        }
    }
}

/// Without what the tokenizer puts around a text. Token ids never have it.
pub(in crate::http) fn bare(prompt: &mut Prompt) {
    if let Prompt::Text(text) = prompt {
        *prompt = Prompt::Bare(std::mem::take(text));
    }
}
