//! What texts are read as, at every cut.

use super::*;

/// The parts of a text that comes in these pieces, with pieces of one part put together.
fn read<'a>(format: &Format, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut reader = format.reader();
    let mut parts = Vec::new();
    for piece in pieces {
        let mut some = Vec::new();
        reader.push(piece, &mut some);
        parts.extend(some);
    }
    reader.finish(&mut parts);
    joined(parts)
}

fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut all: Vec<Part> = Vec::new();
    for part in parts {
        match (all.last_mut(), part) {
            (Some(Part::Content(text)), Part::Content(more))
            | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
            (
                Some(Part::CallArguments { index, text }),
                Part::CallArguments { index: same, text: more },
            ) if *index == same => text.push_str(&more),
            (_, part) => all.push(part),
        }
    }
    all
}

/// The same parts whole, cut in two anywhere, and character by character.
fn at_every_cut(format: &Format, text: &str) -> Vec<Part> {
    let whole = read(format, [text]);
    for (cut, _) in text.char_indices() {
        let (before, after) = text.split_at(cut);
        assert_eq!(read(format, [before, after]), whole, "cut at {cut} of {text:?}");
    }
    let single = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
    assert_eq!(read(format, single), whole, "each character of {text:?}");
    whole
}

fn content(text: &str) -> Part {
    Part::Content(text.to_owned())
}

fn reasoning(text: &str) -> Part {
    Part::Reasoning(text.to_owned())
}

fn thinking(opened: bool) -> Format {
    let mut format = Format::new(Some(ReasoningParser::Think), None).unwrap();
    format.after_prompt(if opened { "<|assistant|><think>\n" } else { "<|assistant|>" });
    format
}

#[test]
fn reasoning_stands_before_the_text() {
    for (opened, text, want) in [
        (false, "<think>\nA b.\n</think>\n\nC d.\n", vec![reasoning("A b."), content("C d.\n")]),
        (false, " \n<think>a</think>b", vec![reasoning("a"), content("b")]),
        (true, "\nA <b> c\n</think>\n\nD", vec![reasoning("A <b> c"), content("D")]),
        (true, "a</think>", vec![reasoning("a")]),
        (true, "a</thin", vec![reasoning("a</thin")]),
        (true, "a\n\n", vec![reasoning("a\n\n")]),
        (false, "\n a </think> b", vec![content("\n a </think> b")]),
        (false, "a <think>b</think>", vec![content("a <think>b</think>")]),
        (false, "<think></think>ü <thin\u{1f600}k>", vec![content("ü <thin\u{1f600}k>")]),
        (true, "a</think>b</think><think>", vec![reasoning("a"), content("b</think><think>")]),
        (false, "<<think>", vec![content("<<think>")]),
        (true, "<</think>a", vec![reasoning("<"), content("a")]),
        (false, "", vec![]),
    ] {
        assert_eq!(at_every_cut(&thinking(opened), text), want, "{text:?}");
    }
}

#[test]
fn long_white_space_is_not_held_back() {
    let white = "\n".repeat(1000);
    let text = format!("<think>a{white}b</think>c");
    let want = [reasoning(&format!("a{white}b")), content("c")];
    assert_eq!(at_every_cut(&thinking(false), &text), want);
    let mut parts = Vec::new();
    let mut reader = thinking(true).reader();
    reader.push("a", &mut parts);
    reader.push(&white, &mut parts);
    let Some(Part::Reasoning(text)) = parts.last() else { panic!("{parts:?}") };
    assert_eq!(text.len(), 1 + 1000 - 256);
}

mod calls;
mod conformance;
mod forced;
mod reasoning;
