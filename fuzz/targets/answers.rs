//! A model's text, in whatever pieces it comes: the same parts, and without calls and markers nothing of it lost.
#![no_main]

use std::collections::HashMap;

use headrace_fuzz::text;
use headrace_router::output::{ArgumentKind, Format, Part, Tools};
use headrace_router::prompt::{ReasoningParser, ToolParser};
use libfuzzer_sys::fuzz_target;

const TOOLS: [ToolParser; 11] = [
    ToolParser::Hermes,
    ToolParser::QwenCoder,
    ToolParser::Llama,
    ToolParser::Pythonic,
    ToolParser::Mistral,
    ToolParser::DeepseekV3,
    ToolParser::DeepseekV31,
    ToolParser::Glm,
    ToolParser::Kimi,
    ToolParser::Harmony,
    ToolParser::Gemma,
];
const REASONING: [Option<ReasoningParser>; 5] = [
    None,
    Some(ReasoningParser::Think),
    Some(ReasoningParser::Mistral),
    Some(ReasoningParser::Harmony),
    Some(ReasoningParser::Gemma),
];

fn format(choice: u8, parallel: bool) -> Option<Format> {
    let parser = TOOLS[usize::from(choice) % TOOLS.len()];
    let reasoning = REASONING[usize::from(choice) / TOOLS.len() % REASONING.len()];
    let arguments = HashMap::from([
        ("n".to_owned(), ArgumentKind::Json),
        ("maybe".to_owned(), ArgumentKind::OptionalText),
    ]);
    let functions =
        HashMap::from([("f".to_owned(), arguments), ("get_weather".to_owned(), HashMap::new())]);
    Format::new(reasoning, Some(Tools { parser, functions, parallel, forced: false }))
}

/// What was read, pieces of one part joined, ids of calls left out: they are random.
fn read<'a>(format: &Format, pieces: impl Iterator<Item = &'a str>) -> Vec<Part> {
    let (mut reader, mut parts, mut read) = (format.reader(), Vec::new(), Vec::<Part>::new());
    let mut take = |parts: &mut Vec<Part>| {
        for part in parts.drain(..) {
            match (read.last_mut(), part) {
                (Some(Part::Content(text)), Part::Content(more)) => text.push_str(&more),
                (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
                (
                    Some(Part::CallArguments { index: last, text }),
                    Part::CallArguments { index, text: more },
                ) if *last == index => text.push_str(&more),
                (_, Part::CallBegins { index, name, .. }) => {
                    read.push(Part::CallBegins { index, id: String::new(), name });
                }
                (_, part) => read.push(part),
            }
        }
    };
    for piece in pieces {
        reader.push(piece, &mut parts);
        take(&mut parts);
    }
    reader.finish(&mut parts);
    take(&mut parts);
    read
}

fuzz_target!(|input: &[u8]| {
    let [choice, step, rest @ ..] = input else { return };
    let (text, step) = (text(rest), usize::from(step % 32).max(1));
    let Some(format) = format(*choice, step % 2 == 0) else { return };
    let whole = read(&format, std::iter::once(text));
    let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let cuts: Vec<usize> = ends.iter().copied().step_by(step).chain([text.len()]).collect();
    let pieces = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
    assert_eq!(read(&format, pieces), whole, "{text:?} in steps of {step}");
    for part in &whole {
        if let Part::CallBegins { name, .. } = part {
            assert!(name == "f" || name == "get_weather", "{name:?} is no function");
        }
    }
});
