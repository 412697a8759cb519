//! How well, and how fast, crates tell answers apart: `python -m bench.router.compare_answer_crates`, which writes the manifest.
//!
//! Reads the cases from standard input, each with what it is, and prints a row for each crate and form: of all cuts of
//! each text into two pieces, how many give what the text is; and CPU time a token.

mod read;

use std::io::Read as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cpu_time::ThreadTime;
use serde::Deserialize;
use serde_json::{Value, json};

use read::{Crate, Got, Names};

#[derive(Deserialize)]
struct Input {
    tools: Value,
    rounds: u32,
    forms: Vec<Form>,
}

#[derive(Deserialize)]
struct Form {
    form: String,
    /// Of the parsers, for each crate that has them.
    names: std::collections::BTreeMap<Crate, Names>,
    cases: Vec<Case>,
    /// What stands before flowing text, and flowing arguments; the characters that then flow.
    heads: [String; 2],
    flows: [String; 2],
}

#[derive(Deserialize)]
struct Case {
    name: String,
    text: String,
    reasons: bool,
    #[serde(flatten)]
    right: Right,
}

#[derive(Deserialize)]
struct Right {
    content: String,
    reasoning: String,
    calls: Vec<(String, Value)>,
}

/// Characters of a token, of which an English text has about this many.
const LENGTHS: [usize; 7] = [4, 3, 5, 2, 6, 4, 1];
const FEW: usize = 250;
const MANY: usize = 1_000;

fn main() {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).expect("standard input is text");
    let input: Input = serde_json::from_str(&text).expect("the Python command wrote it");
    std::panic::set_hook(Box::new(|_| {})); // one that panics is counted as wrong
    let mut rows = Vec::new();
    for form in &input.forms {
        for (of, names) in &form.names {
            let cases = form.cases.iter().filter(|case| !case.reasons || names.reasoning.is_some());
            let cases: Vec<Value> =
                cases.map(|case| conformance(*of, names, &input.tools, case)).collect();
            let [text, few, many] = [(0, MANY), (1, FEW), (1, MANY)].map(|(which, tokens)| {
                let flow = &form.flows[which];
                nanoseconds(*of, names, &input, &form.heads[which], flow, tokens)
            });
            rows.push(json!({
                "crate": of, "form": form.form, "cases": cases, "text_ns": text,
                "arguments_ns": {FEW.to_string(): few, MANY.to_string(): many},
            }));
        }
    }
    println!("{}", Value::from(rows));
}

fn conformance(of: Crate, names: &Names, tools: &Value, case: &Case) -> Value {
    let got = |pieces: &[&str]| {
        let read = || of.prepare(names, case.reasons, tools, pieces)();
        catch_unwind(AssertUnwindSafe(read)).unwrap_or_default()
    };
    let text = &*case.text;
    let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).collect();
    let read: Vec<Got> = cuts.iter().map(|cut| got(&[&text[..*cut], &text[*cut..]])).collect();
    let right = read.iter().filter(|got| is_right(got, case)).count();
    let characters: Vec<String> = text.chars().map(String::from).collect();
    let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
    let (whole, characters) = (got(&[text]), got(&characters));
    let wrong = [&whole, &characters].into_iter().chain(&read).find(|got| !is_right(got, case));
    json!({
        "case": case.name, "cuts": cuts.len(), "right": right,
        "in_one_piece": is_right(&whole, case), "by_characters": is_right(&characters, case),
        "wrong": wrong.map(Got::shown),
    })
}

/// White space may be cut off or added; arguments are compared as values.
fn is_right(got: &Got, case: &Case) -> bool {
    let bare = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    let arguments = |text: &str| match text {
        "" => Some(json!({})),
        text => serde_json::from_str(text).ok(),
    };
    let calls = got.calls.iter().map(|(name, text)| Some((name.clone(), arguments(text)?)));
    bare(&got.content) == bare(&case.right.content)
        && bare(&got.reasoning) == bare(&case.right.reasoning)
        && calls.collect::<Option<Vec<_>>>().as_ref() == Some(&case.right.calls)
}

/// CPU time of a token of `flow` behind `head`, the least of all rounds: other work only ever adds.
fn nanoseconds(
    of: Crate,
    names: &Names,
    input: &Input,
    head: &str,
    flow: &str,
    tokens: usize,
) -> f64 {
    let mut characters = flow.chars().cycle();
    let lengths = LENGTHS.iter().cycle().take(tokens);
    let flowing: Vec<String> =
        lengths.map(|length| characters.by_ref().take(*length).collect()).collect();
    let pieces: Vec<&str> =
        std::iter::once(head).chain(flowing.iter().map(String::as_str)).collect();
    let least = (0..input.rounds).map(|_| {
        let read = of.prepare(names, false, &input.tools, &pieces);
        let began = ThreadTime::now();
        std::hint::black_box(read());
        began.elapsed()
    });
    least.min().unwrap_or_default().as_nanos() as f64 / tokens as f64
}
