//! The grammar of an answer that is a call: each form of calls in Lark, with the arguments held to the functions' schemas.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::arguments::{Argument, arguments};
use crate::prompt::{MistralCalls, ToolParser};

/// Between the tokens of arguments: enough for any line break with its indent, and no endless run.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{0,32}";

/// A function that may be called.
#[derive(Debug, Clone)]
pub struct ForcedFunction {
    /// Its name, of letters, digits, `_` and `-`.
    pub name: String,
    /// The JSON schema of its arguments, an object.
    pub parameters: Value,
}

/// What the grammar of a call depends on beside the functions.
#[derive(Debug, Clone, Copy)]
pub struct CallForm<'a> {
    /// How calls are written.
    pub parser: ToolParser,
    /// There may be several calls.
    pub parallel: bool,
    /// How calls of Mistral's form stand.
    pub mistral: MistralCalls,
    /// How reasoning may come first.
    pub reasoning: ReasoningFirst<'a>,
    /// What else the answer may be.
    pub otherwise: Otherwise<'a>,
}

/// Reasoning before what a grammar is of.
#[derive(Debug, Clone, Copy)]
pub enum ReasoningFirst<'a> {
    /// There is none.
    None,
    /// The grammar begins behind it.
    Passed,
    /// A prompt may have opened it, and this text ends it: more of it is not to come.
    Opened(&'a str),
    /// Messages of gpt-oss in the channel `analysis`.
    Analysis,
}

/// What an answer is that is no call.
#[derive(Debug, Clone, Copy)]
pub enum Otherwise<'a> {
    /// It is a call.
    Never,
    /// Text, with calls in it or without.
    Text,
    /// JSON by this schema.
    Json(&'a Value),
}

/// The Lark source of answers that are calls of `functions`. `token` gives the id of a special token by its name.
#[must_use]
pub fn call_grammar(
    functions: &[ForcedFunction],
    form: CallForm<'_>,
    token: impl Fn(&str) -> Option<u32>,
) -> String {
    let in_text = matches!(form.otherwise, Otherwise::Text);
    let mut lark = Lark { rules: String::new(), token: &token, in_text, mistral: form.mistral };
    let calls: Vec<String> = (0..functions.len()).map(|i| format!("call_{i}")).collect();
    for (function, rule) in functions.iter().zip(&calls) {
        lark.call(form.parser, function, rule);
    }
    let _ = writeln!(lark.rules, "call: {}", calls.join(" | "));
    let (open, between, close) = lark.around(form.parser);
    let more = match between {
        Some(between) if form.parallel => format!(" ({between} call)*"),
        Some(_) | None => String::new(),
    };
    let thought = match form.reasoning {
        ReasoningFirst::None => String::new(),
        ReasoningFirst::Passed => {
            lark.rules.push_str("white: /[ \\n\\r\\t]{1,8}/\n");
            "white? ".to_owned()
        }
        ReasoningFirst::Opened(end) => {
            let end = lark.marker(end);
            format!("({end} {})? ", text("\n\n"))
        }
        ReasoningFirst::Analysis => lark.analysis(),
    };
    let start = match form.otherwise {
        Otherwise::Never => format!("{thought}{open}call{more}{close}"),
        Otherwise::Json(schema) => {
            let schema = with_whitespace(schema.as_object().cloned().unwrap_or_default());
            let _ = writeln!(lark.rules, "answer: %json {schema}");
            format!("{thought}({open}call{more}{close} | answer)")
        }
        Otherwise::Text => lark.within_text(form.parser, &format!("{open}call{more}{close}")),
    };
    format!("start: {start}\n{}", lark.rules)
}

struct Lark<'a> {
    rules: String,
    token: &'a dyn Fn(&str) -> Option<u32>,
    /// Calls stand within text, which ends with what begins a call.
    in_text: bool,
    mistral: MistralCalls,
}

/// A text as Lark has it.
fn text(text: &str) -> String {
    Value::from(text).to_string()
}

impl Lark<'_> {
    /// A marker: a special token of the model by its id, or else its text.
    fn marker(&self, marker: &str) -> String {
        (self.token)(marker).map_or_else(|| text(marker), |id| format!("<[{id}]>"))
    }

    /// What begins a call, unless the text before it does.
    fn begin(&self, marker: &str) -> String {
        if self.in_text { String::new() } else { self.marker(marker) }
    }

    /// Messages of reasoning. Where their markers are no tokens, text could hold these, and there are none.
    fn analysis(&mut self) -> String {
        let markers = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"];
        if markers.iter().any(|marker| (self.token)(marker).is_none()) {
            return String::new();
        }
        let [channel, message, end, start] = markers.map(|marker| self.marker(marker));
        self.rules.push_str("thought: /(.|\\n)*/\n");
        let [analysis, assistant] = ["analysis", "assistant"].map(text);
        format!("({channel} {analysis} {message} thought {end} {start} {assistant})* ")
    }

    /// Text with calls in it; `calls` begin after the marker that ends a text.
    fn within_text(&mut self, parser: ToolParser, calls: &str) -> String {
        let lead = match parser {
            ToolParser::Harmony => {
                let [channel, message, end, start] =
                    ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
                        .map(|one| self.marker(one));
                self.rules.push_str("head: /[^=]*/\ntext: /(.|\\n)*/\n");
                let said = format!("{channel} head {message} text");
                return format!("({said} {end} {start} {})* ({calls} | {said})", text("assistant"));
            }
            // calls stand in the place of the answer, after white space at most
            ToolParser::Llama => r"\{",
            ToolParser::Pythonic => r"\[",
            ToolParser::Hermes | ToolParser::QwenCoder | ToolParser::Glm => "<tool_call>",
            ToolParser::Gemma => "<|tool_call>",
            ToolParser::Mistral => "[TOOL_CALLS]",
            ToolParser::DeepseekV3 | ToolParser::DeepseekV31 => "<｜tool▁calls▁begin｜>",
            ToolParser::Kimi => "<|tool_calls_section_begin|>",
        };
        let white = r"[ \n\r\t]";
        if lead.starts_with('\\') {
            let _ = writeln!(self.rules, r"text: /{white}*([^{lead} \n\r\t](.|\n)*)?/");
            return format!("/{white}*/ {calls} | text");
        }
        self.rules.push_str("text: /(.|\\n)*/\n");
        match (self.token)(lead) {
            Some(id) => format!("(text <[{id}]> {calls})* text"),
            None => {
                let _ = writeln!(self.rules, "before[suffix={}]: /(.|\\n)*/", text(lead));
                format!("(before {calls})* text")
            }
        }
    }

    /// What stands before the first call, between two and after the last one. `None`: there is one at most.
    fn around(&self, parser: ToolParser) -> (String, Option<String>, String) {
        let (mut open, mut close) = (String::new(), String::new());
        let between = match parser {
            // the next text begins the next call
            ToolParser::Hermes | ToolParser::QwenCoder | ToolParser::Glm | ToolParser::Gemma
                if self.in_text =>
            {
                None
            }
            ToolParser::Hermes | ToolParser::QwenCoder | ToolParser::Glm => Some(text("\n")),
            ToolParser::Mistral if self.mistral != MistralCalls::Listed => {
                (!self.in_text).then(|| text(""))
            }
            ToolParser::Llama => Some(text("; ")),
            ToolParser::Pythonic => {
                (open, close) = (format!("{} ", text("[")), format!(" {}", text("]")));
                Some(text(", "))
            }
            ToolParser::Mistral => {
                open = format!("{} {} ", self.begin("[TOOL_CALLS]"), text("["));
                close = format!(" {}", text("]"));
                Some(text(", "))
            }
            ToolParser::DeepseekV3 | ToolParser::DeepseekV31 => {
                open = format!("{} ", self.begin("<｜tool▁calls▁begin｜>"));
                close = format!(" {}", self.marker("<｜tool▁calls▁end｜>"));
                Some(if parser == ToolParser::DeepseekV3 { text("\n") } else { text("") })
            }
            ToolParser::Kimi => {
                open = format!("{} ", self.begin("<|tool_calls_section_begin|>"));
                close = format!(" {}", self.marker("<|tool_calls_section_end|>"));
                Some(text(""))
            }
            ToolParser::Gemma => Some(text("")),
            // a call ends the answer
            ToolParser::Harmony => None,
        };
        (
            open,
            between.map(|between| if between == "\"\"" { String::new() } else { between }),
            close,
        )
    }

    /// The rule of one function's call.
    fn call(&mut self, parser: ToolParser, function: &ForcedFunction, rule: &str) {
        let name = &function.name;
        let marker = |lark: &Self, text: &str| lark.marker(text);
        let body = match parser {
            ToolParser::Hermes => {
                let arguments = self.json(function, rule);
                let head = text(&format!("\n{{\"name\": \"{name}\", \"arguments\": "));
                let (begin, end) = (self.begin("<tool_call>"), marker(self, "</tool_call>"));
                format!("{begin} {head} {arguments} {} {end}", text("}\n"))
            }
            ToolParser::Mistral if self.mistral != MistralCalls::Listed => {
                let arguments = self.json(function, rule);
                let (begin, sep) = (self.begin("[TOOL_CALLS]"), marker(self, "[ARGS]"));
                let id = match self.mistral {
                    MistralCalls::Listed | MistralCalls::Named => String::new(),
                    MistralCalls::NamedWithId => {
                        format!("{} /[a-zA-Z0-9]{{9}}/", marker(self, "[CALL_ID]"))
                    }
                };
                format!("{begin} {} {id} {sep} {arguments}", text(name))
            }
            ToolParser::Llama | ToolParser::Mistral => {
                let arguments = self.json(function, rule);
                let field = if parser == ToolParser::Llama { "parameters" } else { "arguments" };
                let head = text(&format!("{{\"name\": \"{name}\", \"{field}\": "));
                format!("{head} {arguments} {}", text("}"))
            }
            ToolParser::DeepseekV3 | ToolParser::DeepseekV31 => {
                let arguments = self.json(function, rule);
                let [begin, sep, end] =
                    ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
                        .map(|text| marker(self, text));
                if parser == ToolParser::DeepseekV31 {
                    format!("{begin} {} {sep} {arguments} {end}", text(name))
                } else {
                    let head = text(&format!("{name}\n```json\n"));
                    let function = text("function");
                    format!("{begin} {function} {sep} {head} {arguments} {} {end}", text("\n```"))
                }
            }
            ToolParser::Kimi => {
                let arguments = self.json(function, rule);
                let [begin, sep, end] =
                    ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
                        .map(|text| marker(self, text));
                let head = text(&format!("functions.{name}:"));
                format!("{begin} {head} /[0-9]{{1,3}}/ {sep} {arguments} {end}")
            }
            ToolParser::Harmony => {
                let arguments = self.json(function, rule);
                let [channel, constrain, message] =
                    ["<|channel|>", "<|constrain|>", "<|message|>"].map(|text| marker(self, text));
                let head = text(&format!("commentary to=functions.{name} "));
                format!("{channel} {head} {constrain} {} {message} {arguments}", text("json"))
            }
            ToolParser::QwenCoder => {
                let arguments = self.elements(function, rule, |lark, key, value| {
                    let begin = text(&format!("<parameter={key}>\n"));
                    let end = "\n</parameter>\n";
                    lark.element(&begin, value, end)
                });
                let (begin, end) = (self.begin("<tool_call>"), marker(self, "</tool_call>"));
                let head = text(&format!("\n<function={name}>\n"));
                format!("{begin} {head} {arguments} {} {end}", text("</function>\n"))
            }
            ToolParser::Glm => {
                let arguments = self.elements(function, rule, |lark, key, value| {
                    let begin = text(&format!("<arg_key>{key}</arg_key>\n<arg_value>"));
                    lark.element(&begin, value, "</arg_value>\n")
                });
                let (begin, end) = (self.begin("<tool_call>"), marker(self, "</tool_call>"));
                format!("{begin} {} {arguments} {end}", text(&format!("{name}\n")))
            }
            ToolParser::Pythonic => {
                let arguments = self.listed(function, rule, '=');
                format!("{} {arguments} {}", text(&format!("{name}(")), text(")"))
            }
            ToolParser::Gemma => {
                let arguments = self.listed(function, rule, ':');
                let (begin, end) = (self.begin("<|tool_call>"), marker(self, "<tool_call|>"));
                format!(
                    "{begin} {} {arguments} {} {end}",
                    text(&format!("call:{name}{{")),
                    text("}")
                )
            }
        };
        let _ = writeln!(self.rules, "{rule}: {body}");
    }

    /// Arguments as one object; the name of its rule.
    fn json(&mut self, function: &ForcedFunction, rule: &str) -> String {
        let name = format!("{rule}_json");
        let _ = writeln!(self.rules, "{name}: %json {}", whole(&function.parameters));
        name
    }

    /// One argument, whose value begins after `begin` and ends with `end`.
    fn element(&mut self, begin: &str, value: &Element<'_>, end: &str) -> String {
        match value.texts() {
            Some(Texts::Any { least, most }) => {
                let name = format!("{}_text", value.rule);
                let times = match (least, most) {
                    (0, None) => "*".to_owned(),
                    (least, most) => {
                        let most = most.map_or(String::new(), |most| most.to_string());
                        format!("{{{least},{most}}}")
                    }
                };
                let _ = writeln!(self.rules, "{name}[suffix={}]: /(.|\\n){times}/", text(end));
                format!("{begin} {name}")
            }
            Some(Texts::These(these)) => {
                let these: Vec<String> = these.iter().map(|one| text(one)).collect();
                format!("{begin} ({}) {}", these.join(" | "), text(end))
            }
            None => format!("{begin} {} {}", value.json(self), text(end)),
        }
    }

    /// Arguments one by one, in the order of the schema; those that are not required may be left out.
    fn elements(
        &mut self,
        function: &ForcedFunction,
        rule: &str,
        mut write: impl FnMut(&mut Self, &str, &Element<'_>) -> String,
    ) -> String {
        let mut sequence = Vec::new();
        for (place, argument) in arguments(&function.parameters).into_iter().enumerate() {
            let Argument { name, schema, required } = argument;
            let rule = format!("{rule}_{place}");
            let value = Element { root: &function.parameters, schema, rule: &rule };
            let body = write(self, name, &value);
            let _ = writeln!(self.rules, "{rule}: {body}");
            let mark = if required { "" } else { "?" };
            sequence.push(format!("{rule}{mark}"));
        }
        sequence.join(" ")
    }

    /// Arguments with commas between them: the required ones, then others in their order.
    fn listed(&mut self, function: &ForcedFunction, rule: &str, sign: char) -> String {
        let mut required = Vec::new();
        let mut others = Vec::new();
        for (place, argument) in arguments(&function.parameters).into_iter().enumerate() {
            let Argument { name, schema, required: is_required } = argument;
            let rule = format!("{rule}_{place}");
            let value = Element { root: &function.parameters, schema, rule: &rule };
            let json = value.json(self);
            let _ = writeln!(self.rules, "{rule}: {} {json}", text(&format!("{name}{sign}")));
            if is_required {
                required.push(rule);
            } else {
                others.push(rule);
            }
        }
        let comma = format!(" {} ", text(", "));
        if required.is_empty() {
            // at most one beginning is without a comma
            let tails = others.iter().enumerate().map(|(place, first)| {
                let rest: String =
                    others[place + 1..].iter().map(|rule| format!(" ({comma}{rule})?")).collect();
                format!("{first}{rest}")
            });
            let tails: Vec<String> = tails.collect();
            return if tails.is_empty() {
                String::new()
            } else {
                format!("({})?", tails.join(" | "))
            };
        }
        let rest: String = others.iter().map(|rule| format!(" ({comma}{rule})?")).collect();
        format!("{}{rest}", required.join(&comma))
    }
}

/// One argument of a function.
struct Element<'a> {
    root: &'a Value,
    schema: &'a Value,
    rule: &'a str,
}

enum Texts<'a> {
    /// Of so many characters.
    Any {
        least: u64,
        most: Option<u64>,
    },
    These(Vec<&'a str>),
}

impl<'a> Element<'a> {
    /// The texts that it may be; `None` for a value that is written as JSON.
    fn texts(&self) -> Option<Texts<'a>> {
        let these = self.schema["enum"].as_array().map(|all| all.iter().map(Value::as_str));
        if let Some(these) = these {
            return these.collect::<Option<Vec<&str>>>().map(Texts::These);
        }
        if self.schema["type"] != "string" {
            return None;
        }
        if let Some(one) = self.schema["const"].as_str() {
            return Some(Texts::These(vec![one]));
        }
        let length = |key: &str| self.schema[key].as_u64();
        Some(Texts::Any { least: length("minLength").unwrap_or(0), most: length("maxLength") })
    }

    fn json(&self, lark: &mut Lark<'_>) -> String {
        let mut schema = self.schema.clone();
        if refers(&schema) {
            // places are of the whole schema, which is no longer around this one
            lead_into_whole(&mut schema);
            let mut root = self.root.clone();
            lead_into_whole(&mut root);
            schema["$defs"] = json!({ WHOLE: root });
        }
        let schema = match schema {
            Value::Object(schema) => schema,
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Array(_) => Map::new(),
        };
        let name = format!("{}_json", self.rule);
        let _ = writeln!(lark.rules, "{name}: %json {}", with_whitespace(schema));
        name
    }
}

/// The schema of arguments as a whole: an object, whatever it leaves out.
fn whole(parameters: &Value) -> Value {
    let mut schema = parameters.as_object().cloned().unwrap_or_default();
    schema.entry("type").or_insert_with(|| json!("object"));
    with_whitespace(schema)
}

fn with_whitespace(mut schema: Map<String, Value>) -> Value {
    schema.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": WHITESPACE }));
    Value::Object(schema)
}

/// The name of the whole schema among the definitions of a part of it.
const WHOLE: &str = "headrace-whole";

/// Some place of the schema is named.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => fields.contains_key("$ref") || fields.values().any(refers),
        Value::Array(items) => items.iter().any(refers),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Makes the places that are named those of the whole schema among the definitions.
fn lead_into_whole(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(place)) = fields.get_mut("$ref")
                && let Some(rest) = place.strip_prefix('#')
            {
                *place = format!("#/$defs/{WHOLE}{rest}");
            }
            fields.values_mut().for_each(lead_into_whole);
        }
        Value::Array(items) => items.iter_mut().for_each(lead_into_whole),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
