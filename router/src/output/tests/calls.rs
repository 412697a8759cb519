//! Calls in every form: what is one, what is none, and that no text is lost.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::prompt::ToolParser;

/// `f` with arguments of all kinds, and `get-time`.
pub(super) fn tools(parser: ToolParser) -> Tools {
    let arguments = HashMap::from([
        ("n".to_owned(), ArgumentKind::Json),
        ("list".to_owned(), ArgumentKind::Json),
        ("maybe".to_owned(), ArgumentKind::OptionalText),
    ]);
    let functions =
        HashMap::from([("f".to_owned(), arguments), ("get-time".to_owned(), HashMap::new())]);
    Tools { parser, functions, parallel: true, forced: false }
}

fn format(parser: ToolParser) -> Format {
    let reasoning = (parser == ToolParser::Harmony).then_some(ReasoningParser::Harmony);
    Format::new(reasoning, Some(tools(parser))).unwrap()
}

/// Calls with their arguments; ids of ours are checked and left out.
#[derive(Debug, PartialEq)]
pub(super) enum Got {
    Said(String),
    Thought(String),
    Called(String, String),
}

pub(super) fn said(text: &str) -> Got {
    Got::Said(text.to_owned())
}

pub(super) fn called(name: &str, arguments: &str) -> Got {
    Got::Called(name.to_owned(), arguments.to_owned())
}

/// What a text is read as at every cut.
pub(super) fn got(format: &Format, text: &str) -> Vec<Got> {
    let whole = gather(read(format, [text]));
    for (cut, _) in text.char_indices() {
        let (before, after) = text.split_at(cut);
        assert_eq!(gather(read(format, [before, after])), whole, "cut at {cut} of {text:?}");
    }
    let single = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
    assert_eq!(gather(read(format, single)), whole, "each character of {text:?}");
    whole
}

pub(super) fn gather(parts: Vec<Part>) -> Vec<Got> {
    let mut all = Vec::new();
    let mut calls = 0;
    for part in parts {
        match part {
            Part::Content(text) => all.push(Got::Said(text)),
            Part::Reasoning(text) => all.push(Got::Thought(text)),
            Part::CallBegins { index, id, name } => {
                assert_eq!(index, calls);
                assert!(!id.is_empty());
                calls += 1;
                all.push(Got::Called(name, String::new()));
            }
            Part::CallArguments { index, text } => {
                assert_eq!(index + 1, calls);
                let Some(Got::Called(_, arguments)) = all.last_mut() else {
                    panic!("arguments of no call");
                };
                arguments.push_str(&text);
            }
        }
    }
    all
}

const ARGUMENTS: &str = r#"{"city": "Zürich \"}\" \u00e9 </tool_call>", "n": [1, {"a": null}]}"#;

#[test]
fn hermes() {
    let format = format(ToolParser::Hermes);
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let one = call("f", ARGUMENTS);
    for (text, want) in [
        (one.clone(), vec![called("f", ARGUMENTS)]),
        (
            format!("Let me see.\n{one}\n{}", call("get-time", "{}")),
            vec![said("Let me see."), called("f", ARGUMENTS), called("get-time", "{}")],
        ),
        (format!("{one} Done.\n"), vec![called("f", ARGUMENTS), said("Done.\n")]),
        (
            r#"<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>"#.into(),
            vec![called("f", r#"{"a": 1}"#)],
        ),
        (
            r#"<tool_call>{"name": "f", "arguments": "{\"a\": \"\\n\"}"}</tool_call>"#.into(),
            vec![called("f", r#"{"a": "\n"}"#)],
        ),
        (r#"<tool_call>{"name": "get-time"}"#.into(), vec![called("get-time", "{}")]),
        (
            r#"<tool_call>{"name": "f", "arguments": {"a": "b"#.into(),
            vec![called("f", r#"{"a": "b"#)],
        ),
        (
            // the arguments break off: what follows is text
            r#"<tool_call>{"name": "f", "arguments": {"a" x"#.into(),
            vec![called("f", r#"{"a" "#), said("x")],
        ),
    ] {
        assert_eq!(got(&format, &text), want, "{text}");
    }
    for none in [
        "<tool_call>",
        "<tool_call> x </tool_call>",
        "<tool_call>\n<tool_call>\nx",
        r#"<tool_call>{"name": "g", "arguments": {}}</tool_call>"#,
        r#"<tool_call>{"name": 5}</tool_call>"#,
        r#"<tool_call>{"name": "f", "arguments": [1]}"#,
        r#"<tool_call>{"arguments": {}}</tool_call>"#,
        r#"<tool_call>{"name": "f"#,
        "a </tool_call> b <tool_cal> <tool_calls",
    ] {
        assert_eq!(got(&format, none), [said(none)]);
    }
}

#[test]
fn llama() {
    let format = format(ToolParser::Llama);
    let call = format!(r#"{{"name": "f", "parameters": {ARGUMENTS}}}"#);
    for (text, want) in [
        (call.clone(), vec![called("f", ARGUMENTS)]),
        (format!("<|python_tag|>{call}"), vec![called("f", ARGUMENTS)]),
        (
            format!("\n{call}; {{\"name\": \"get-time\", \"parameters\": {{}}}}"),
            vec![called("f", ARGUMENTS), called("get-time", "{}")],
        ),
        (format!("{call}; and"), vec![called("f", ARGUMENTS), said("; and")]),
        (format!("See {call}"), vec![said(&format!("See {call}"))]),
        (r#"{"name": "g"}"#.into(), vec![said(r#"{"name": "g"}"#)]),
        ("<|python_tag|>print(1)".into(), vec![said("<|python_tag|>print(1)")]),
        ("{} {".into(), vec![said("{} {")]),
    ] {
        assert_eq!(got(&format, &text), want, "{text}");
    }
    let hidden = format.hiding(|marker| marker.starts_with("<|"));
    assert_eq!(got(&hidden, "<|python_tag|>print(1)"), [said("print(1)")]);
}

#[test]
fn mistral() {
    let format = format(ToolParser::Mistral);
    for (text, want) in [
        (
            format!(
                r#"[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "get-time", "arguments": {{}}}}]"#
            ),
            vec![called("f", ARGUMENTS), called("get-time", "{}")],
        ),
        (
            format!("Well.[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]get-time{{}}"),
            vec![said("Well."), called("f", ARGUMENTS), called("get-time", "{}")],
        ),
        ("[TOOL_CALLS]g[ARGS]{}".into(), vec![said("[TOOL_CALLS]g[ARGS]{}")]),
        ("[TOOL_CALLS] [x]".into(), vec![said("[TOOL_CALLS] [x]")]),
        ("a [TOOL] b".into(), vec![said("a [TOOL] b")]),
    ] {
        assert_eq!(got(&format, &text), want, "{text}");
    }
    let parts = read(&format, ["[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]f{}"]);
    let ids: Vec<&str> = parts
        .iter()
        .filter_map(|part| match part {
            Part::CallBegins { id, .. } => Some(id.as_str()),
            Part::Content(_) | Part::Reasoning(_) | Part::CallArguments { .. } => None,
        })
        .collect();
    assert_eq!(ids[0], "abcdefghi");
    assert!(ids[1].len() == 9 && ids[1].chars().all(|c| c.is_ascii_alphanumeric()), "{}", ids[1]);
}

#[test]
fn deepseek() {
    let v3 = |name: &str, arguments: &str| {
        format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        )
    };
    let v31 = |name: &str, arguments: &str| {
        format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    };
    for parser in [ToolParser::DeepseekV3, ToolParser::DeepseekV31] {
        let format = format(parser);
        for write in [&v3 as &dyn Fn(&str, &str) -> String, &v31] {
            let (one, two) = (write("f", ARGUMENTS), write("get-time", "{}"));
            let text = format!("So.<｜tool▁calls▁begin｜>{one}\n{two}<｜tool▁calls▁end｜>");
            let want = [said("So."), called("f", ARGUMENTS), called("get-time", "{}")];
            assert_eq!(got(&format, &text), want);
            let unknown = format!("<｜tool▁calls▁begin｜>{}", write("g", "{}"));
            assert_eq!(got(&format, &unknown), [said(&unknown)]);
            let hidden = Format::new(None, Some(tools(parser))).unwrap().hiding(|_| true);
            let bare = ["calls▁begin", "call▁begin", "sep", "call▁end"]
                .iter()
                .fold(unknown.clone(), |text, name| {
                    text.replace(&format!("<｜tool▁{name}｜>"), "")
                });
            assert_eq!(got(&hidden, &unknown), [said(&bare)]);
        }
        let text = "a <｜tool▁calls▁begin｜> b";
        assert_eq!(got(&format, text), [said(text)]);
    }
}

#[test]
fn kimi() {
    let format = format(ToolParser::Kimi);
    let call = |name: &str, arguments: &str| {
        format!("<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>")
    };
    let (one, two) = (call("functions.f:0", ARGUMENTS), call("get-time:1", " {}"));
    let text = format!("<|tool_calls_section_begin|>{one}{two}<|tool_calls_section_end|>");
    assert_eq!(got(&format, &text), [called("f", ARGUMENTS), called("get-time", "{}")]);
    let Some(Part::CallBegins { id, .. }) = read(&format, [&*text]).into_iter().next() else {
        panic!("no call")
    };
    assert_eq!(id, "functions.f:0");
    let unknown = call("functions.g:0", "{}");
    assert_eq!(got(&format, &unknown), [said(&unknown)]);
}

#[test]
fn elements() {
    let qwen = "<tool_call>\n<function=f>\n<parameter=city>\nZü\"rich\n\n</parameter>\n<parameter=n>\n 5\n</parameter>\n\
        <parameter=list>\n[1, {\"a\": \"</x>\"}]\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n</function>\n</tool_call>";
    let glm = "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Zü\"rich\n</arg_value>\n<arg_key>n</arg_key>\n\
        <arg_value>5</arg_value>\n<arg_key>list</arg_key><arg_value>[1, {\"a\": \"</x>\"}]</arg_value>\
        <arg_key>maybe</arg_key><arg_value>null</arg_value></tool_call>";
    let arguments = r#"{"city": "Zü\"rich\n", "n": 5, "list": [1, {"a": "</x>"}], "maybe": null}"#;
    for (parser, text, empty, python) in [
        (
            ToolParser::QwenCoder,
            qwen,
            "<function=get-time>\n</function>",
            "<function=f><parameter=n>True</parameter><parameter=list>a\nb</parameter></function>",
        ),
        (
            ToolParser::Glm,
            glm,
            "<tool_call>get-time\n</tool_call>",
            "<tool_call>f<arg_key>n</arg_key><arg_value>True</arg_value><arg_key>list</arg_key>\
             <arg_value>a\nb</arg_value></tool_call>",
        ),
    ] {
        let format = format(parser);
        assert_eq!(got(&format, text), [called("f", arguments)]);
        let both = format!("Now:\n{text}\n{empty} end");
        let (one, two) = (called("f", arguments), called("get-time", "{}"));
        let want = [said("Now:"), one, two, said("\n\n end")];
        assert_eq!(got(&format, &both), want);
        assert_eq!(got(&format, python), [called("f", r#"{"n": true, "list": "a\nb"}"#)]);
        let cut = text.find("rich").unwrap();
        assert_eq!(got(&format, &text[..cut]), [called("f", r#"{"city": "Zü\""#)]);
        let unknown = text.replace("f>", "g>").replace("call>f", "call>g");
        assert_eq!(got(&format, &unknown), [said(&unknown)]);
    }
    let long = format!(
        "<function=f><parameter=list>[{}]</parameter></function>",
        vec!["1"; 20_000].join(",")
    );
    let parts = gather(read(&format(ToolParser::QwenCoder), [&*long]));
    let Got::Called(_, arguments) = &parts[0] else { panic!("no call") };
    assert_eq!(serde_json::from_str::<serde_json::Value>(arguments).unwrap()["list"][19_999], 1);
    // what is too long to be held and cannot be JSON of its kind is a text all the same
    for (name, text) in
        [("maybe", "say \"ü\"\n"), ("maybe", "[1, "), ("list", "- a\n"), ("n", "\"a\" ")]
    {
        let text = text.repeat(5000);
        let long = format!(
            "<tool_call>f<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>"
        );
        let parts = gather(read(&format(ToolParser::Glm), [&*long]));
        let [Got::Called(_, arguments)] = &parts[..] else { panic!("no call") };
        assert_eq!(serde_json::from_str::<serde_json::Value>(arguments).unwrap()[name], text);
    }
}

#[test]
fn pythonic() {
    let format = format(ToolParser::Pythonic);
    for (text, want) in [
        (
            r#"[f(city='Zü"rich\n', n=-1.5e3, list=[1, (True, None), {'a': "it's", 'b': {}}], x=\u00e9), get-time()]"#
                .replace(r"x=\u00e9", r"x='\u00e9\x41\d'"),
            vec![
                called(
                    "f",
                    r#"{"city": "Zü\"rich\n", "n": -1.5e3, "list": [1, [true, null], {"a": "it's", "b": {}}], "x": "\u00e9\u0041\\d"}"#,
                ),
                called("get-time", "{}"),
            ],
        ),
        ("[f(n=1,)]".into(), vec![called("f", r#"{"n": 1}"#)]),
        ("<|python_start|>[f()]<|python_end|>".into(), vec![called("f", "{}")]),
        ("[f(n=blue)]".into(), vec![called("f", r#"{"n": "blue"}"#)]),
        ("[f(n=1".into(), vec![called("f", r#"{"n": "#)]),
        ("[1] says".into(), vec![said("[1] says")]),
        ("[g()]".into(), vec![said("[g()]")]),
        ("x [f()]".into(), vec![said("x [f()]")]),
        ("[f(1)] or".into(), vec![said("[f(1)] or")]),
        ("[get-time(), f(1)]".into(), vec![called("get-time", "{}"), said(", f(1)]")]),
        ("[f, x]".into(), vec![said("[f, x]")]),
    ] {
        assert_eq!(got(&format, &text), want, "{text}");
    }
}

#[test]
fn gemma() {
    let format = format(ToolParser::Gemma);
    let text = r#"Ok <|tool_call>call:f{city:<|"|>Zü"rich<|"|>,n:5,list:[1,true,<|"|>a<|"|>],o:{k:<|"|>v<|"|>}}<tool_call|>"#;
    let arguments = r#"{"city": "Zü\"rich", "n": 5, "list": [1, true, "a"], "o": {"k": "v"}}"#;
    assert_eq!(got(&format, text), [said("Ok"), called("f", arguments)]);
    let none = "<|tool_call>call:g{}<tool_call|>";
    assert_eq!(got(&format, none), [said(none)]);
}

#[test]
fn harmony() {
    let format = format(ToolParser::Harmony);
    let thought = |text: &str| Got::Thought(text.to_owned());
    for (text, want) in [
        (
            "<|channel|>analysis<|message|>Hm. <x><|end|><|start|>assistant<|channel|>final<|message|>Hi!".to_owned(),
            vec![thought("Hm. <x>"), said("Hi!")],
        ),
        (
            format!(
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
            ),
            vec![thought("Hm."), called("f", ARGUMENTS)],
        ),
        (
            "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.get-time<|channel|>commentary json<|message|>{}"
                .to_owned(),
            vec![said("First."), called("get-time", "{}")],
        ),
        (
            "<|channel|>commentary to=functions.g<|message|>{}<|call|>".to_owned(),
            vec![said("{}")],
        ),
        ("no channels".to_owned(), vec![said("no channels")]),
    ] {
        assert_eq!(got(&format, &text), want, "{text}");
    }
}

#[test]
fn after_the_one_call_that_is_wanted_nothing_comes() {
    for (parser, text) in [
        (
            ToolParser::Hermes,
            r#"<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>"#,
        ),
        (ToolParser::Llama, r#"{"name": "f"}; {"name": "f"}"#),
        (ToolParser::Mistral, r#"[TOOL_CALLS][{"name": "f"}, {"name": "f"}]"#),
        (ToolParser::Pythonic, "[f(), f()]"),
        (
            ToolParser::Harmony,
            "<|channel|>x to=f<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>x",
        ),
    ] {
        let tools = Tools { parallel: false, ..tools(parser) };
        let format = Format::new(None, Some(tools)).unwrap();
        assert_eq!(got(&format, text), [called("f", "{}")], "{parser:?}");
        let mut reader = format.reader();
        reader.push(text, &mut Vec::new());
        assert!(reader.is_over() && reader.called(), "{parser:?}");
    }
}

/// Pieces of all forms, whole and broken.
const PIECES: [&str; 44] = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "{",
    "}",
    "\"name\": \"f\"",
    "\"arguments\": ",
    ", ",
    "{}",
    "f",
    "g",
    "<function=",
    "f>",
    "</function>",
    "<parameter=n>",
    "</parameter>",
    "5",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[",
    "]",
    "f(",
    ")",
    "n=",
    "'a'",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<|tool_call_begin|>",
    "<|tool_call>",
    "ü\u{1f600}",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "``",
    "<tool",
];

proptest! {
    /// Whatever a text is, its cuts do not matter; and where no call begins, it stays as it is but for white space beside markers.
    #[test]
    fn no_text_is_lost(
        parser in prop::sample::select(ToolParser::ALL.to_vec()),
        pieces in prop::collection::vec(prop::sample::select(PIECES.to_vec()), 0..24),
        cuts in prop::collection::vec(0_usize..200, 0..6),
    ) {
        let format = format(parser);
        let text = pieces.concat();
        let whole = gather(read(&format, [&*text]));
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| text.is_char_boundary(*cut)).collect();
        cuts.push(text.len());
        cuts.sort_unstable();
        let mut from = 0;
        let pieces = cuts.iter().filter(|cut| **cut <= text.len()).map(|cut| {
            let piece = &text[from..*cut];
            from = *cut;
            piece
        });
        prop_assert_eq!(&gather(read(&format, pieces.collect::<Vec<_>>())), &whole);
        let calls = whole.iter().any(|part| matches!(part, Got::Called(..)));
        if !calls && parser != ToolParser::Harmony {
            let all: String = whole.iter().map(|part| match part {
                Got::Said(text) | Got::Thought(text) => text.as_str(),
                Got::Called(..) => "",
            }).collect();
            prop_assert_eq!(all, text);
        }
    }

    /// Any text at all, also of great depth.
    #[test]
    fn any_text_is_read(
        parser in prop::sample::select(ToolParser::ALL.to_vec()),
        text in "(<tool_call>|\\[TOOL_CALLS\\]|<function=f><parameter=n>|\\{|\\[|\"|\\\\|[a-z<>| ]|\\PC){0,60}",
    ) {
        got(&format(parser), &text.repeat(2));
    }
}
