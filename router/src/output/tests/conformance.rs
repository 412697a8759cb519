//! What every form of calls and of reasoning is read as, at every cut of the text and at every length of it.

use super::calls::{Got, called, gather, got, said, tools};
use super::*;
use crate::prompt::ToolParser;

/// One character of what a client gets, or the begin of a call.
#[derive(Debug, PartialEq, Clone)]
enum Bit {
    Said(char),
    Thought(char),
    Begins(String),
    Argument(char),
}

fn bits(parts: &[Part]) -> Vec<Bit> {
    let mut bits = Vec::new();
    for part in parts {
        match part {
            Part::Content(text) => bits.extend(text.chars().map(Bit::Said)),
            Part::Reasoning(text) => bits.extend(text.chars().map(Bit::Thought)),
            Part::CallBegins { name, .. } => bits.push(Bit::Begins(name.clone())),
            Part::CallArguments { text, .. } => bits.extend(text.chars().map(Bit::Argument)),
        }
    }
    bits
}

/// What a text is read as: whole, in any two and any three pieces, by its characters; and that what was sent stays true
/// however the text goes on.
fn conforms(format: &Format, text: &str) -> Vec<Got> {
    let whole = gather(read(format, [text]));
    let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut all = Vec::new();
    let mut reader = format.reader();
    reader.push(text, &mut all);
    reader.finish(&mut all);
    let all = bits(&all);
    for (place, &first) in cuts.iter().enumerate() {
        for &second in &cuts[place..] {
            let pieces = [&text[..first], &text[first..second], &text[second..]];
            assert_eq!(gather(read(format, pieces)), whole, "{pieces:?}");
        }
        let (mut reader, mut parts) = (format.reader(), Vec::new());
        reader.push(&text[..first], &mut parts);
        let streamed = bits(&parts);
        assert!(all.starts_with(&streamed), "after {:?}: {streamed:?}", &text[..first]);
        reader.finish(&mut parts);
        let cut = gather(parts);
        for (got, want) in cut.iter().zip(&whole) {
            if let (Got::Called(name, some), Got::Called(other, arguments)) = (got, want) {
                let open = some.strip_suffix('}').unwrap_or(some);
                assert!(
                    name == other && arguments.starts_with(open),
                    "{:?}: {some}",
                    &text[..first]
                );
            }
        }
    }
    let single = cuts.windows(2).map(|ends| &text[ends[0]..ends[1]]);
    assert_eq!(gather(read(format, single)), whole, "each character of {text:?}");
    whole
}

fn format(parser: ToolParser) -> Format {
    let reasoning = (parser == ToolParser::Harmony).then_some(ReasoningParser::Harmony);
    Format::new(reasoning, Some(tools(parser))).unwrap()
}

/// How a form writes a call of `f` with these arguments as JSON and as the form has them, and one without arguments.
struct Written {
    parser: ToolParser,
    /// Before the first call, between two, after the last one.
    around: [&'static str; 3],
    call: &'static str,
    arguments: &'static str,
    /// Another one, of `get-time`, whose arguments are left out or empty.
    empty: &'static [&'static str],
    /// Calls come only where the answer begins.
    leads: bool,
}

const FORMS: [Written; 11] = [
    Written {
        parser: ToolParser::Hermes,
        around: ["", "\n", ""],
        call: "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"é{\\\"}\"}}</tool_call>",
        arguments: "{\"a\":\"é{\\\"}\"}",
        empty: &[
            "<tool_call>{\"name\":\"get-time\",\"arguments\":\"\"}</tool_call>",
            "<tool_call>{\"arguments\":\" \",\"name\":\"get-time\"}</tool_call>",
            "<tool_call>{\"name\":\"get-time\",\"arguments\":null}</tool_call>",
            "<tool_call>{\"name\":\"get-time\"}",
        ],
        leads: false,
    },
    Written {
        parser: ToolParser::QwenCoder,
        around: ["<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"],
        call: "<function=f>\n<parameter=a>\né{\"<}\n</parameter>\n<parameter=n>\n5\n</parameter></function>",
        arguments: "{\"a\": \"é{\\\"<}\", \"n\": 5}",
        empty: &["<function=get-time>\n</function>", "<function=get-time></function>"],
        leads: false,
    },
    Written {
        parser: ToolParser::Llama,
        around: ["", "; ", ""],
        call: "{\"name\":\"f\",\"parameters\":{\"a\":\"é{\\\"}\"}}",
        arguments: "{\"a\":\"é{\\\"}\"}",
        empty: &[
            "{\"name\":\"get-time\",\"parameters\":\"\"}",
            "{\"parameters\":null,\"name\":\"get-time\"}",
            "{\"name\":\"get-time\"}",
        ],
        leads: true,
    },
    Written {
        parser: ToolParser::Pythonic,
        around: ["[", ", ", "]"],
        call: "f(a='é{\"]', n=[1, (2,)])",
        arguments: "{\"a\": \"é{\\\"]\", \"n\": [1, [2]]}",
        empty: &["get-time()", "get-time( )"],
        leads: true,
    },
    Written {
        parser: ToolParser::Mistral,
        around: ["[TOOL_CALLS][", ", ", "]"],
        call: "{\"name\":\"f\",\"arguments\":{\"a\":\"é{\\\"}\"}}",
        arguments: "{\"a\":\"é{\\\"}\"}",
        empty: &["{\"name\":\"get-time\",\"arguments\":\"\"}", "{\"name\":\"get-time\"}"],
        leads: false,
    },
    Written {
        parser: ToolParser::DeepseekV3,
        around: ["<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"],
        call: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\":\"é{\\\"}\"}\n```<｜tool▁call▁end｜>",
        arguments: "{\"a\":\"é{\\\"}\"}",
        empty: &[
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n\n```<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time<｜tool▁call▁end｜>",
        ],
        leads: false,
    },
    Written {
        parser: ToolParser::DeepseekV31,
        around: ["<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"],
        call: "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\":\"é{\\\"}\"}<｜tool▁call▁end｜>",
        arguments: "{\"a\":\"é{\\\"}\"}",
        empty: &["<｜tool▁call▁begin｜>get-time<｜tool▁sep｜> <｜tool▁call▁end｜>"],
        leads: false,
    },
    Written {
        parser: ToolParser::Glm,
        around: ["", "\n", ""],
        call: "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>é{\"<}</arg_value><arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
        arguments: "{\"a\": \"é{\\\"<}\", \"n\": 5}",
        empty: &["<tool_call>get-time\n</tool_call>", "<tool_call>get-time</tool_call>"],
        leads: false,
    },
    Written {
        parser: ToolParser::Kimi,
        around: ["<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"],
        call: "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\":\"é{\\\"}\"}<|tool_call_end|>",
        arguments: "{\"a\":\"é{\\\"}\"}",
        empty: &[
            "<|tool_call_begin|>get-time:1<|tool_call_argument_begin|><|tool_call_end|>",
            "<|tool_call_begin|>get-time:1<|tool_call_argument_begin|> <|tool_call_end|>",
        ],
        leads: false,
    },
    Written {
        parser: ToolParser::Harmony,
        around: ["", "", ""],
        call: "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\":\"é{\\\"}\"}<|call|>",
        arguments: "{\"a\":\"é{\\\"}\"}",
        empty: &[
            "<|start|>assistant<|channel|>commentary to=get-time<|message|><|call|>",
            "<|start|>assistant<|channel|>commentary to=get-time<|message|> ",
        ],
        leads: false,
    },
    Written {
        parser: ToolParser::Gemma,
        around: ["", "", ""],
        call: "<|tool_call>call:f{a:<|\"|>é{\"}<|\"|>,n:[1]}<tool_call|>",
        arguments: "{\"a\": \"é{\\\"}\", \"n\": [1]}",
        empty: &["<|tool_call>call:get-time{}<tool_call|>"],
        leads: false,
    },
];

#[test]
fn calls_alone_and_side_by_side() {
    for form in &FORMS {
        let Written { parser, around: [open, between, close], call, arguments, .. } = form;
        let format = format(*parser);
        let one = format!("{open}{call}{close}");
        assert_eq!(conforms(&format, &one), [called("f", arguments)], "{one}");
        let last = form.empty[form.empty.len() - 1];
        let two = format!("{open}{call}{between}{last}{close}");
        let want = [called("f", arguments), called("get-time", "{}")];
        assert_eq!(gather(read(&format, [&*two])), want, "{two}");
    }
}

#[test]
fn a_call_without_arguments_has_an_empty_object_of_them() {
    for Written { parser, around: [open, _, close], empty, .. } in &FORMS {
        for call in *empty {
            let text = format!("{open}{call}{close}");
            assert_eq!(conforms(&format(*parser), &text), [called("get-time", "{}")], "{text}");
        }
    }
}

/// White space stands between two texts, and is none before a call that nothing stands before, or behind the last one.
#[test]
fn text_around_calls_is_what_is_left_without_them() {
    for Written { parser, around: [open, between, close], call, arguments, leads, .. } in &FORMS {
        if *leads || *parser == ToolParser::Harmony {
            continue; // calls come first, or texts are messages
        }
        let format = format(*parser);
        let calls = format!("{open}{call}{close}");
        let f = || called("f", arguments);
        for (before, after, want) in [
            ("é\n", "", vec![said("é"), f()]),
            (" \n", "\n ", vec![f()]),
            ("\n", " b\n", vec![f(), said("b\n")]),
            ("a ", "b", vec![said("a"), f(), said(" b")]),
            ("a", " \nb", vec![said("a"), f(), said(" \nb")]),
            ("a", "b", vec![said("a"), f(), said("b")]),
        ] {
            let text = format!("{before}{calls}{after}");
            assert_eq!(gather(read(&format, [&*text])), want, "{text}");
            if !after.is_empty() {
                conforms(&format, &text);
            }
        }
        let several = format!("a\n{open}{call}{between}{call}{close}\n\nb");
        let got = gather(read(&format, [&*several]));
        let white = got.iter().filter_map(|got| match got {
            Got::Said(text) => Some(text.as_str()),
            Got::Thought(_) | Got::Called(..) => None,
        });
        let between = if close.is_empty() { between } else { "" }; // else it is part of the form
        let between = if *parser == ToolParser::DeepseekV3 { "\n" } else { between };
        let between = if *parser == ToolParser::QwenCoder { "\n" } else { between };
        assert_eq!(white.collect::<String>(), format!("a\n{between}\n\nb"), "{several}");
    }
}

#[test]
fn white_space_around_calls_is_bounded() {
    let format = format(ToolParser::Hermes);
    let call = "<tool_call>{\"name\":\"f\"}</tool_call>";
    let text = format!("a{}{call}{}b", "\n".repeat(1000), " ".repeat(1000));
    let whole = gather(read(&format, [&*text]));
    assert_eq!(gather(read(&format, text.split_inclusive(' '))), whole);
    let [Got::Said(before), Got::Called(..), Got::Said(after)] = &whole[..] else {
        panic!("{whole:?}")
    };
    assert_eq!(before.len() + after.len(), 1000 + 2);
}

/// Openers that are special tokens are not shown, however much white space stands behind them, and others are not cut.
#[test]
fn openers_before_long_white_space_stay_whole() {
    for hidden in [false, true] {
        for (white, call) in [(200, false), (300, false), (300, true), (250, true)] {
            let white = "\n".repeat(white);
            let rest = if call { "<function=f></function>" } else { "x" };
            let format = format(ToolParser::QwenCoder).hiding(|_| hidden);
            let text = format!("a <tool_call>{white}<tool_call>{white}{rest}");
            let whole = gather(read(&format, [&*text]));
            let single = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
            assert_eq!(gather(read(&format, single)), whole);
            let shown = whole.iter().map(|got| match got {
                Got::Said(text) => text.as_str(),
                Got::Thought(_) | Got::Called(..) => "",
            });
            let shown: String = shown.collect();
            let opener = if hidden { "" } else { "<tool_call>" };
            let lost = shown.replace("<tool_call>", "");
            assert!(!lost.contains(|c| !matches!(c, 'a' | 'x' | ' ' | '\n')), "{shown}");
            if call {
                assert_eq!(whole.last(), Some(&called("f", "{}")));
                assert!(!hidden || !shown.contains('<'), "{shown}");
            } else {
                assert_eq!(shown, format!("a {opener}{white}{opener}{white}x"));
            }
        }
    }
}

/// Nothing of what is no call is lost or changed.
#[test]
fn what_is_no_call_stays_as_it_is() {
    for (parser, texts) in [
        (
            ToolParser::Hermes,
            &[
                "<tool_call>{\"name\":\"f\",\"arguments\":[1]}</tool_call>",
                "<tool_call>{\"name\":\"f\",\"arguments\":\"[]\"}</tool_call>",
                "<tool_call>{\"name\":\"f\",\"arguments\":\"\\ud83d\"}</tool_call>",
                "a <tool_call> {é} <tool_call",
                "<tool_call>{\"name\":\"é\"}</tool_call>",
            ][..],
        ),
        (
            ToolParser::QwenCoder,
            &[
                "<tool_call>\n<function=g>\n</function>\n</tool_call>",
                "<function=f",
                "<tool_call> é",
            ],
        ),
        (ToolParser::Llama, &["{\"name\":\"g\"}", "{\"name\": f}", "é {\"name\":\"f\"}", "{"]),
        (ToolParser::Pythonic, &["[f(a)]", "[f(=1)]", "[é]", "f()", "[f("]),
        (
            ToolParser::Mistral,
            &["[TOOL_CALLS]é[ARGS]{}", "[TOOL_CALLS][{}]", "[TOOL_CALLS]f[ARGS]"],
        ),
        (
            ToolParser::DeepseekV3,
            &[
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```py\n{}",
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g<｜tool▁call▁end｜>",
            ],
        ),
        (
            ToolParser::DeepseekV31,
            &["<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>é"],
        ),
        (
            ToolParser::Glm,
            &["<tool_call>g\n</tool_call>", "<tool_call>f\n<arg", "<tool_call>é</tool_call>"],
        ),
        (
            ToolParser::Kimi,
            &[
                "<|tool_call_begin|>f:0<|tool_call_argument_begin|><|tool_calls",
                "<|tool_call_begin|>f:0<|tool_call_argument_begin|>é",
            ],
        ),
        (
            ToolParser::Gemma,
            &["<|tool_call>call:g{}<tool_call|>", "<|tool_call>call:f{é", "<|tool_call>f{}"],
        ),
        (ToolParser::Harmony, &["é <|channel", "a b"]),
    ] {
        for text in texts {
            assert_eq!(conforms(&format(parser), text), [said(text)], "{parser:?}");
        }
    }
}

/// Values at the bounds of JSON are passed on as the model wrote them.
#[test]
fn odd_values_are_passed_on() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(60), "]".repeat(60));
    for arguments in [
        r#"{"a":NaN,"b":[-Infinity,Infinity]}"#,
        r#"{"a":1,"a":{"a":2}}"#,
        r#"{"a":123456789012345678901234567890e999999}"#,
        r#"{"a":"\ud83d"}"#,
        &deep,
    ] {
        for (parser, before, after) in [
            (ToolParser::Hermes, "<tool_call>{\"name\":\"f\",\"arguments\":", "}</tool_call>"),
            (ToolParser::Llama, "{\"name\":\"f\",\"parameters\":", "}"),
            (ToolParser::Mistral, "[TOOL_CALLS]f[ARGS]", ""),
            (
                ToolParser::DeepseekV31,
                "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
            ),
            (ToolParser::Kimi, "<|tool_call_begin|>f<|tool_call_argument_begin|>", ""),
            (ToolParser::Harmony, "<|channel|>x to=f<|message|>", "<|call|>"),
        ] {
            let text = format!("{before}{arguments}{after}");
            assert_eq!(got(&format(parser), &text), [called("f", arguments)], "{text}");
        }
    }
    for (text, want) in [
        ("[f(n=1e999, m=-5)]", r#"{"n": 1e999, "m": -5}"#),
        ("[f(n=NaN)]", r#"{"n": "NaN"}"#),
        (r"[f(a='\ud83d')]", r#"{"a": "\ud83d"}"#),
        ("[f(n=1, n=2)]", r#"{"n": 1, "n": 2}"#),
    ] {
        assert_eq!(conforms(&format(ToolParser::Pythonic), text), [called("f", want)]);
    }
    let glm = "<tool_call>f<arg_key>n</arg_key><arg_value>1e999</arg_value><arg_key>list</arg_key><arg_value>NaN</arg_value></tool_call>";
    assert_eq!(got(&format(ToolParser::Glm), glm), [called("f", r#"{"n": 1e999, "list": "NaN"}"#)]);
}

/// Arguments as a text that holds JSON are that JSON.
#[test]
fn quoted_arguments_are_unwrapped() {
    let format = format(ToolParser::Hermes);
    for (quoted, want) in [
        (r#""{\"a\": \"\\ud83d\"}""#, r#"{"a": "\ud83d"}"#),
        (r#"" {\"a\": \"é\\n\"}""#, r#"{"a": "é\n"}"#),
        (r#""{\"a\": \"\ud83d\ude00\"}""#, "{\"a\": \"\u{1f600}\"}"),
        (r#""{\ud83d""#, "{\u{fffd}"),
        (r#""\n""#, "{}"),
    ] {
        for text in [
            format!("<tool_call>{{\"name\":\"f\",\"arguments\":{quoted}}}</tool_call>"),
            format!("<tool_call>{{\"arguments\":{quoted},\"name\":\"f\"}}</tool_call>"),
        ] {
            assert_eq!(conforms(&format, &text), [called("f", want)], "{text}");
        }
    }
}

/// A call that goes on as none ends there, and the next one is found.
#[test]
fn after_a_broken_call_comes_text_and_then_a_call() {
    for (parser, text, want) in [
        (
            ToolParser::QwenCoder,
            "<function=f>\n<tool_call><function=get-time></function>",
            vec![called("f", "{}"), called("get-time", "{}")],
        ),
        (
            ToolParser::QwenCoder,
            "<function=f><param x <function=get-time></function>",
            vec![called("f", "{}"), said("<param x"), called("get-time", "{}")],
        ),
        (
            ToolParser::Glm,
            "<tool_call>f<arg_key>a</arg_key>x<tool_call>get-time</tool_call>",
            vec![called("f", "{\"a\": \""), said("x"), called("get-time", "{}")],
        ),
        (
            ToolParser::DeepseekV3,
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}\n`` x",
            vec![called("f", "{}"), said("`` x")],
        ),
        (
            ToolParser::Hermes,
            "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":<tool_call>{\"name\":\"get-time\"}",
            vec![called("f", "{\"a\":"), called("get-time", "{}")],
        ),
    ] {
        let got = gather(read(&format(parser), [text]));
        let single = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        assert_eq!(gather(read(&format(parser), single)), got);
        let closed = |got: &Got| match got {
            Got::Called(name, arguments) if arguments == "{\"a\": \"\"}" => {
                called(name, "{\"a\": \"")
            }
            Got::Called(name, arguments) => called(name, arguments),
            Got::Said(text) => said(text),
            Got::Thought(text) => Got::Thought(text.clone()),
        };
        assert_eq!(got.iter().map(closed).collect::<Vec<_>>(), want, "{text}");
    }
}

fn thought(text: &str) -> Got {
    Got::Thought(text.to_owned())
}

const REASONING: [(ReasoningParser, &str, &str); 3] = [
    (ReasoningParser::Think, "<think>", "</think>"),
    (ReasoningParser::Mistral, "[THINK]", "[/THINK]"),
    (ReasoningParser::Gemma, "<|channel>thought", "<channel|>"),
];

#[test]
fn reasoning_of_every_form() {
    for (parser, begin, end) in REASONING {
        let mut format = Format::new(Some(parser), None).unwrap();
        let call = "<tool_call>{\"name\":\"f\"}";
        for (text, want) in [
            (
                format!("{begin}\né {call}\n{end}\n\nb\n"),
                vec![thought(&format!("é {call}")), said("b\n")],
            ),
            (format!("\n{begin}{end}a"), vec![said("a")]),
            (
                format!("{begin}a{begin}b{end}c{end}"),
                vec![thought(&format!("a{begin}b")), said(&format!("c{end}"))],
            ),
            (format!("a{begin}b{end}"), vec![said(&format!("a{begin}b{end}"))]),
            (
                format!("{begin}a{}", &end[..end.len() - 1]),
                vec![thought(&format!("a{}", &end[..end.len() - 1]))],
            ),
            (begin[..begin.len() - 1].to_owned(), vec![said(&begin[..begin.len() - 1])]),
        ] {
            assert_eq!(conforms(&format, &text), want, "{text}");
        }
        format.after_prompt(&format!("user\n{begin}\n"));
        let text = format!("é{end} a");
        assert_eq!(conforms(&format, &text), [thought("é"), said("a")]);
        format.after_prompt(&format!("{begin}\n\n{end}\n\n"));
        assert_eq!(conforms(&format, "é"), [said("é")], "the prompt has ended it");
    }
    let format = Format::new(Some(ReasoningParser::Harmony), None).unwrap();
    for (text, want) in [
        (
            "<|channel|>analysis<|message|>é<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c<|return|>",
            vec![thought("é\nb"), said("c")],
        ),
        ("<|channel|>final<|message|>a <|chan", vec![said("a <|chan")]),
        ("<|channel|>analysis<|message|>a", vec![thought("a")]),
    ] {
        assert_eq!(gather(read(&format, [text])), want);
        got(&format, text);
    }
}

/// Calls within reasoning are none; those behind it are, in every form.
#[test]
fn calls_in_reasoning_are_none() {
    for Written { parser, around: [open, _, close], call, arguments, .. } in &FORMS {
        if *parser == ToolParser::Harmony {
            continue; // its reasoning is a message
        }
        for (reasoning, begin, end) in REASONING {
            let format = Format::new(Some(reasoning), Some(tools(*parser))).unwrap();
            let calls = format!("{open}{call}{close}");
            let text = format!("{begin}{calls}{end}\n{calls}");
            let want = [thought(&calls), called("f", arguments)];
            assert_eq!(got(&format, &text), want, "{text}");
        }
    }
}

/// The grammar of a call that has to be may take the end of a reasoning that nothing opened: it is not shown.
#[test]
fn an_end_of_reasoning_before_a_call_that_has_to_be_is_not_shown() {
    for Written { parser, around: [open, _, close], call, arguments, .. } in &FORMS {
        if *parser == ToolParser::Harmony {
            continue;
        }
        for (reasoning, begin, end) in REASONING {
            let tools = Tools { forced: true, ..tools(*parser) };
            let mut format = Format::new(Some(reasoning), Some(tools)).unwrap();
            for opened in [false, true] {
                format.after_prompt(if opened { begin } else { "" });
                for before in [String::new(), format!("{end}\n\n")] {
                    let text = format!("{before}{open}{call}{close}");
                    assert_eq!(got(&format, &text), [called("f", arguments)], "{text}");
                }
            }
        }
    }
}

/// Messages of one kind stand on lines of their own.
#[test]
fn messages_of_harmony() {
    let format = format(ToolParser::Harmony);
    let text = "<|channel|>commentary<|message|>a<|end|><|start|>assistant to=f<|channel|>commentary<|message|>{\"é\": 1} x<|call|><|start|>assistant<|channel|>final<|message|>b";
    assert_eq!(got(&format, text), [said("a"), called("f", "{\"é\": 1}"), said("\nb")]);
    let text = "<|channel|>commentary to=f<|message|>{'é': 1} x<|call|>";
    assert_eq!(conforms(&format, text), [called("f", "{'é': 1} x")], "no JSON is passed on");
}
