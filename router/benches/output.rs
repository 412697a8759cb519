//! What telling an answer apart costs a token: `cargo bench -p headrace-router --bench output`, written by
//! `python -m bench.router.readers`.
//!
//! Prints JSON: for each form of calls and of reasoning, nanoseconds a token while text flows, while arguments flow, and
//! while reasoning flows. Each figure is the least of many rounds of some hundred microseconds: other work only ever adds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use headrace_router::output::{ArgumentKind, Format, Part, Tools};
use headrace_router::prompt::{ReasoningParser, ToolParser};
use serde_json::{Value, json};

/// Tokens of a round.
const TOKENS: usize = 4_000;
/// Characters of a token, of which an English text has about this many.
const LENGTHS: [usize; 7] = [4, 3, 5, 2, 6, 4, 1];
const WORDS: &str =
    "The river runs down to the mill, and the mill race (1 < 2) carries the water to the wheel.\n";

#[expect(clippy::print_stdout, reason = "it is what the bench is run for")]
fn main() {
    let rounds = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(400);
    let mut cases = vec![json!({"form": "no reader", "text_ns": nothing(rounds)})];
    for parser in ToolParser::ALL {
        let (head, arguments) = call(parser);
        let text = if parser == ToolParser::Harmony { "<|channel|>final<|message|>" } else { "" };
        cases.push(json!({
            "form": parser.as_str(),
            "text_ns": each_token(&format(parser, None), text, WORDS, rounds),
            "arguments_ns": each_token(&format(parser, None), head, arguments, rounds),
        }));
    }
    for (parser, head) in [
        (ReasoningParser::Think, "<think>"),
        (ReasoningParser::Mistral, "[THINK]"),
        (ReasoningParser::Gemma, "<|channel>thought"),
        (ReasoningParser::Harmony, "<|channel|>analysis<|message|>"),
    ] {
        let format = Format::new(Some(parser), None).expect("it has parts");
        cases.push(json!({
            "form": format!("reasoning {}", parser.as_str()),
            "reasoning_ns": each_token(&format, head, WORDS, rounds),
        }));
    }
    println!("{}", Value::from(cases));
}

fn format(parser: ToolParser, reasoning: Option<ReasoningParser>) -> Format {
    let arguments = [("list".to_owned(), ArgumentKind::Json)].into();
    let functions = [("f".to_owned(), arguments)].into();
    let tools = Tools { parser, functions, parallel: true, forced: false };
    Format::new(reasoning, Some(tools)).expect("it has parts")
}

/// The beginning of a call up to a long text among its arguments, and what this text is made of.
fn call(parser: ToolParser) -> (&'static str, &'static str) {
    const JSON: &str =
        "The river runs \\\"down\\\" to the mill, and the race (1 < 2) carries its water.\\n";
    match parser {
        ToolParser::Hermes => ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"", JSON),
        ToolParser::Llama => ("{\"name\": \"f\", \"parameters\": {\"a\": \"", JSON),
        ToolParser::Mistral => ("[TOOL_CALLS]f[ARGS]{\"a\": \"", JSON),
        ToolParser::DeepseekV3 => {
            ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"", JSON)
        }
        ToolParser::DeepseekV31 => ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"", JSON),
        ToolParser::Kimi => {
            ("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"", JSON)
        }
        ToolParser::Harmony => {
            ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"", JSON)
        }
        ToolParser::QwenCoder => ("<tool_call>\n<function=f>\n<parameter=a>\n", WORDS),
        ToolParser::Glm => ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", WORDS),
        ToolParser::Pythonic => ("[f(a=\"", JSON),
        ToolParser::Gemma => ("<|tool_call>call:f{a:<|\"|>", WORDS),
    }
}

/// A text cut into tokens.
fn tokens(text: &str) -> Vec<String> {
    let mut characters = text.chars().cycle();
    let lengths = LENGTHS.iter().cycle().take(TOKENS);
    lengths.map(|length| characters.by_ref().take(*length).collect()).collect()
}

/// Nanoseconds of a token of `text` after `head`, with what its parts take.
fn each_token(format: &Format, head: &str, text: &str, rounds: u32) -> f64 {
    let tokens = tokens(text);
    let mut parts: Vec<Part> = Vec::new();
    least(rounds, || {
        let mut reader = format.reader();
        reader.push(head, &mut parts);
        parts.clear();
        let began = Instant::now();
        let mut bytes = 0;
        for token in &tokens {
            reader.push(token, &mut parts);
            bytes += parts.drain(..).map(|part| size(&part)).sum::<usize>();
        }
        let took = began.elapsed();
        assert!(bytes > TOKENS, "the parts of {head:?} hold the text");
        took
    })
}

/// What the loop itself takes, and the copy of the text that each part is.
fn nothing(rounds: u32) -> f64 {
    let tokens = tokens(WORDS);
    let mut parts: Vec<Part> = Vec::new();
    least(rounds, || {
        let began = Instant::now();
        for token in &tokens {
            parts.push(Part::Content(token.clone()));
            black_box(parts.drain(..).map(|part| size(&part)).sum::<usize>());
        }
        began.elapsed()
    })
}

fn size(part: &Part) -> usize {
    match black_box(part) {
        Part::Content(text) | Part::Reasoning(text) | Part::CallArguments { text, .. } => {
            text.len()
        }
        Part::CallBegins { .. } => 0,
    }
}

fn least(rounds: u32, mut round: impl FnMut() -> Duration) -> f64 {
    let least = (0..rounds).map(|_| round()).min().unwrap_or_default();
    least.as_nanos() as f64 / TOKENS as f64
}
