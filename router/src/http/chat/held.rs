//! Calls that are held to a grammar: which ones, whether their schemas can be followed, and the grammar.

use serde_json::{Map, Value};

use super::tools::{CallWish, ToolChoice};
use crate::core::frame::Grammar;
use crate::error::RouteError;
use crate::http::Surface;
use crate::http::grammar as grammars;
use crate::http::parse::fields::{bad, clip, unsupported};
use crate::http::parse::grammar::{self, Asked};
use crate::http::parse::params::ModelFacts;
use crate::limits::memory::MemoryShare;
use crate::limits::shares::Holder;
use crate::output::{
    self, CallForm, ForcedFunction, Otherwise, ReasoningFirst, Tools, call_grammar, reasoning_texts,
};
use crate::prompt::{MistralCalls, PromptEngine, ReasoningParser, ToolParser};
use crate::request::grammar::{endless, spell_out};

/// Calls that are held to a grammar.
#[derive(Debug)]
pub(in crate::http) struct HeldCalls {
    functions: Vec<HeldFunction>,
    parser: ToolParser,
    mistral: MistralCalls,
    parallel: bool,
    reasoning: ReasoningFirst<'static>,
    /// The answer is a call, or what else it may be.
    otherwise: Allowed,
    /// The schemas of the arguments, still to be checked.
    schemas: Vec<Asked>,
}

#[derive(Debug)]
struct HeldFunction {
    function: ForcedFunction,
    /// Its schema's place in the request.
    at: String,
}

#[derive(Debug)]
enum Allowed {
    Nothing,
    Text,
    Json(Value),
}

/// The calls that need a grammar: those that have to be, those of strict functions, and those beside an answer that is JSON.
/// Only then is the answer held to more than the client's own grammar.
///
/// # Errors
/// `BadRequest` about a schema that cannot be one; `BodyTooComplex` or `Overloaded` if there is no memory for it.
pub(super) fn held(
    wish: &CallWish,
    read: Option<&Tools>,
    tools: &[Value],
    answer: Option<&Asked>,
    model: &ModelFacts,
    memory: &mut MemoryShare,
) -> Result<Option<HeldCalls>, RouteError> {
    let Some(read) = read else { return Ok(None) };
    let must = wish.choice == ToolChoice::Must;
    let offered = |tool: &Value| {
        tool["function"]["name"].as_str().is_some_and(|name| read.functions.contains_key(name))
    };
    let strict = |tool: &Value| offered(tool) && tool["function"]["strict"] == true;
    let first_strict = tools.iter().position(strict);
    let otherwise = match answer {
        _ if must => Allowed::Nothing,
        // its calls are JSON as well, and a grammar cannot tell the two apart
        Some(_) if read.parser == ToolParser::Llama => return Ok(None),
        Some(answer) => match answer.schema()? {
            Some(mut schema) => {
                spell_out(&mut schema);
                Allowed::Json(schema)
            }
            None => return Ok(None), // a text of the client's own form has no calls in it
        },
        None => match first_strict {
            Some(place) => {
                can_be_held_in_text(read.parser, model, place)?;
                Allowed::Text
            }
            None => return Ok(None),
        },
    };
    let mut calls = HeldCalls {
        functions: Vec::new(),
        parser: read.parser,
        mistral: model.conventions.mistral,
        parallel: read.parallel,
        reasoning: reasoning_first(model, &otherwise),
        otherwise,
        schemas: Vec::new(),
    };
    for (i, tool) in tools.iter().enumerate() {
        let function = &tool["function"];
        let name = function["name"].as_str().unwrap_or_default();
        if !read.functions.contains_key(name) {
            continue;
        }
        let at = format!("tools[{i}].function.parameters");
        let held = must || function["strict"] == true;
        let parameters = Some(&function["parameters"]).filter(|schema| held && schema.is_object());
        let parameters = parameters.cloned().unwrap_or_else(|| Value::Object(Map::new()));
        let asked = grammar::json(parameters.clone(), at.clone())?;
        let bytes = 6 * asked.grammar.source.len(); // as values and as text
        memory.charge(bytes).map_err(|refused| refused.body(Some(at.clone())))?;
        let Some(parameters) = output::resolved(&parameters) else {
            let at = format!("{at}.$ref");
            let why = "it has to lead to a schema in the same place that is no reference to itself";
            return Err(bad(&at, format!("`{at}` cannot be followed: {why}")));
        };
        can_be_written(&parameters, read.parser, &at)?;
        let mut object = parameters.clone();
        object["type"] = "object".into();
        if let Some(place) = endless(&object) {
            let at = format!("{at}{place}");
            let why = "each value that fits holds another one that has to fit";
            return Err(bad(&at, format!("`{at}` cannot be followed: {why}")));
        }
        calls.schemas.push(asked);
        let mut parameters = parameters;
        spell_out(&mut parameters);
        let function = ForcedFunction { name: name.to_owned(), parameters };
        calls.functions.push(HeldFunction { function, at });
    }
    Ok(Some(calls))
}

/// What of the reasoning the grammar has to know.
fn reasoning_first(model: &ModelFacts, otherwise: &Allowed) -> ReasoningFirst<'static> {
    match model.conventions.reasoning {
        _ if model.reasoning.is_some() => ReasoningFirst::Passed,
        _ if matches!(otherwise, Allowed::Json(_)) => ReasoningFirst::None,
        None => ReasoningFirst::None,
        Some(ReasoningParser::Harmony) => ReasoningFirst::Analysis,
        Some(parser) => match reasoning_texts(parser) {
            Some((_, end)) => ReasoningFirst::Opened(end),
            None => ReasoningFirst::None,
        },
    }
}

/// Calls that begin an answer cannot be told from text behind reasoning whose end is no token.
fn can_be_held_in_text(
    parser: ToolParser,
    model: &ModelFacts,
    place: usize,
) -> Result<(), RouteError> {
    let leads = matches!(parser, ToolParser::Llama | ToolParser::Pythonic);
    if leads && model.conventions.reasoning.is_some() && model.reasoning.is_none() {
        let why =
            "this model's calls begin its answers, and no token ends the reasoning before them";
        return Err(unsupported(format!("tools[{place}].function.strict"), why));
    }
    Ok(())
}

/// Keywords of the arguments as a whole that forms cannot hold to which write them one by one.
const OF_THE_WHOLE: [&str; 10] = [
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "const",
    "enum",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
];

/// Arguments are an object; and the forms that write them one by one, outside of JSON, cannot write every name.
fn can_be_written(parameters: &Value, parser: ToolParser, at: &str) -> Result<(), RouteError> {
    let kind = &parameters["type"];
    let listed = || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "object"));
    let object = kind.is_null() || kind == "object" || listed();
    if !object {
        let at = format!("{at}.type");
        return Err(bad(&at, format!("`{at}` must be \"object\": arguments have names")));
    }
    let wrong = |at: String, why: &str| Err(bad(&at, format!("`{at}` cannot be followed: {why}")));
    let (word, as_text): (fn(char) -> bool, bool) = match parser {
        ToolParser::Pythonic | ToolParser::Gemma => {
            (|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'), false)
        }
        ToolParser::QwenCoder | ToolParser::Glm => {
            (|c| !c.is_control() && !c.is_whitespace() && !matches!(c, '<' | '>'), true)
        }
        ToolParser::Hermes
        | ToolParser::Llama
        | ToolParser::Mistral
        | ToolParser::DeepseekV3
        | ToolParser::DeepseekV31
        | ToolParser::Kimi
        | ToolParser::Harmony => return Ok(()),
    };
    if let Some(key) = OF_THE_WHOLE.into_iter().find(|key| parameters.get(*key).is_some()) {
        let why =
            "this model's calls have arguments one by one, which are held to their own schemas";
        return wrong(format!("{at}.{key}"), why);
    }
    for argument in output::arguments(parameters) {
        let name = argument.name;
        let declared = parameters["properties"].get(name).is_some();
        let place = if declared {
            format!("{at}.properties.{}", clip(name))
        } else {
            format!("{at}.required")
        };
        if !(1..=128).contains(&name.len()) || !name.chars().all(word) {
            return wrong(place, "this model's calls cannot have an argument of this name");
        }
        if argument.schema == &Value::Bool(false) {
            return wrong(place, "no value can be given for an argument that is required");
        }
        let is_text = argument.schema["type"] == "string" && as_text;
        let bound =
            ["pattern", "format"].into_iter().find(|key| argument.schema.get(key).is_some());
        if let (true, Some(key)) = (is_text, bound) {
            return wrong(
                format!("{place}.{key}"),
                "this model's calls write texts without quotes",
            );
        }
    }
    Ok(())
}

impl HeldCalls {
    /// The grammar knows of reasoning before the answer.
    pub(super) fn knows_reasoning(&self) -> bool {
        !matches!(self.reasoning, ReasoningFirst::None)
    }

    /// What the answer follows, from its first token on or behind its reasoning.
    ///
    /// # Errors
    /// `BadRequest` about the place of what cannot be followed.
    pub(in crate::http) async fn checked(
        &mut self,
        surface: &Surface,
        holder: Holder,
        engine: &PromptEngine,
    ) -> Result<Grammar, RouteError> {
        for schema in self.schemas.drain(..) {
            grammars::check(surface, holder, Some(schema)).await?;
        }
        let (whole, each) = self.to_check()?;
        if let Err(error) = grammars::check(surface, holder, Some(whole)).await {
            // where one function is at fault, it is named
            for one in each {
                grammars::check(surface, holder, Some(one)).await?;
            }
            return Err(error);
        }
        self.grammar(engine)
    }

    fn grammar(&self, engine: &PromptEngine) -> Result<Grammar, RouteError> {
        let functions: Vec<ForcedFunction> =
            self.functions.iter().map(|held| held.function.clone()).collect();
        grammar::made(self.source(&functions, |token| engine.special_token(token)), "tools")
    }

    /// The same grammar with its markers as texts, to be checked; then that of each function alone, by its place.
    ///
    /// # Errors
    /// `BadRequest` if the functions are too many for one grammar.
    fn to_check(&self) -> Result<(Asked, Vec<Asked>), RouteError> {
        let all: Vec<ForcedFunction> =
            self.functions.iter().map(|held| held.function.clone()).collect();
        let whole = grammar::lark(self.source(&all, |_| None), "tools".to_owned())?;
        let each = self.functions.iter().map(|held| {
            let source = self.source(std::slice::from_ref(&held.function), |_| None);
            grammar::lark(source, held.at.clone())
        });
        Ok((whole, each.collect::<Result<_, _>>()?))
    }

    fn source(&self, functions: &[ForcedFunction], token: impl Fn(&str) -> Option<u32>) -> String {
        let form = CallForm {
            parser: self.parser,
            parallel: self.parallel,
            mistral: self.mistral,
            reasoning: self.reasoning,
            otherwise: match &self.otherwise {
                Allowed::Nothing => Otherwise::Never,
                Allowed::Text => Otherwise::Text,
                Allowed::Json(schema) => Otherwise::Json(schema),
            },
        };
        call_grammar(functions, form, token)
    }
}

#[cfg(test)]
mod tests;
