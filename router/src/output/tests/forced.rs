//! Grammars of forced calls: they compile, hold to schemas, and what follows them is read as a call.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::*;
use crate::core::frame::{Grammar, GrammarKind};
use crate::prompt::{MistralCalls, ToolParser};
use crate::request::grammar::{Follower, GrammarTokens};

/// All bytes, an end, and some special tokens.
const SPECIAL: [&str; 8] = [
    "<｜tool▁call▁begin｜>",
    "<|tool_call_begin|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "</think>",
];

fn special(token: &str) -> Option<u32> {
    let place = SPECIAL.iter().position(|one| *one == token)?;
    Some(257 + u32::try_from(place).unwrap())
}

fn vocabulary() -> GrammarTokens {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    words.push(b"\xffend".to_vec());
    words.extend(SPECIAL.map(|name| [b"\xff", name.as_bytes()].concat()));
    GrammarTokens::new(&words, &[256]).unwrap()
}

fn tokens(text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    let mut rest = text;
    'text: while let Some(c) = rest.chars().next() {
        for name in SPECIAL {
            if let Some(after) = rest.strip_prefix(name) {
                ids.extend(special(name));
                rest = after;
                continue 'text;
            }
        }
        ids.extend(rest[..c.len_utf8()].bytes().map(u32::from));
        rest = &rest[c.len_utf8()..];
    }
    ids
}

fn may_end(follower: &mut Follower) -> bool {
    follower.finished() || follower.count_allowed(&[256]) == 1
}

fn functions() -> Vec<ForcedFunction> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"$ref": "#/$defs/count"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": false,
        "$defs": {"count": {"type": "integer"}},
    });
    vec![
        ForcedFunction { name: "weather".into(), parameters },
        ForcedFunction {
            name: "now".into(),
            parameters: json!({"properties": {}, "additionalProperties": false}),
        },
    ]
}

fn form(parser: ToolParser, otherwise: Otherwise<'_>) -> CallForm<'_> {
    let (mistral, reasoning) = (MistralCalls::Listed, ReasoningFirst::None);
    CallForm { parser, parallel: true, mistral, reasoning, otherwise }
}

/// How each form writes a call of `weather`, with these days; and one of `now`.
fn written(parser: ToolParser, days: &str) -> [String; 2] {
    let arguments = format!(r#"{{"city": "Bonn", "days": {days}, "unit": "C"}}"#);
    let quoted = |name: &str, field: &str, arguments: &str| {
        format!(r#"{{"name": "{name}", "{field}": {arguments}}}"#)
    };
    match parser {
        ToolParser::Hermes => [("weather", &*arguments), ("now", "{}")].map(|(name, arguments)| {
            format!("<tool_call>\n{}\n</tool_call>", quoted(name, "arguments", arguments))
        }),
        ToolParser::Llama => {
            [quoted("weather", "parameters", &arguments), quoted("now", "parameters", "{}")]
        }
        ToolParser::Mistral => [("weather", &*arguments), ("now", "{}")]
            .map(|(name, arguments)| format!("[TOOL_CALLS][{}]", quoted(name, "arguments", arguments))),
        ToolParser::DeepseekV3 => [("weather", &*arguments), ("now", "{}")].map(|(name, arguments)| {
            format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        }),
        ToolParser::DeepseekV31 => [("weather", &*arguments), ("now", "{}")].map(|(name, arguments)| {
            format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
        }),
        ToolParser::Kimi => [("weather", &*arguments), ("now", "{}")].map(|(name, arguments)| {
            format!("<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>")
        }),
        ToolParser::Harmony => [("weather", &*arguments), ("now", "{}")].map(|(name, arguments)| {
            format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")
        }),
        ToolParser::QwenCoder => [
            format!("<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>"),
            "<tool_call>\n<function=now>\n</function>\n</tool_call>".into(),
        ],
        ToolParser::Glm => [
            format!("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>"),
            "<tool_call>now\n</tool_call>".into(),
        ],
        ToolParser::Pythonic => {
            [format!(r#"[weather(city="Bonn", days={days}, unit="C")]"#), "[now()]".into()]
        }
        ToolParser::Gemma => [
            format!(r#"<|tool_call>call:weather{{city:"Bonn", days:{days}, unit:"C"}}<tool_call|>"#),
            "<|tool_call>call:now{}<tool_call|>".into(),
        ],
    }
}

#[test]
fn what_follows_the_grammar_is_a_call() {
    let vocabulary = vocabulary();
    for parser in ToolParser::ALL {
        let reasoning = ReasoningFirst::Opened("</think>");
        let form = CallForm { reasoning, ..form(parser, Otherwise::Never) };
        let source = call_grammar(&functions(), form, special);
        let grammar = Grammar { kind: GrammarKind::Lark, source: source.clone().into() };
        let compiled = vocabulary.compile(&grammar);
        let compiled = compiled.unwrap_or_else(|error| panic!("{parser:?}: {error}\n{source}"));
        let kinds = HashMap::from([("days".to_owned(), ArgumentKind::Json)]);
        let functions =
            HashMap::from([("weather".to_owned(), kinds), ("now".to_owned(), HashMap::new())]);
        let tools = Tools { parser, functions, parallel: true, forced: true };
        let format = Format::new(None, Some(tools)).unwrap();
        for (text, name, arguments) in written(parser, "3")
            .into_iter()
            .zip([("weather", json!({"city": "Bonn", "days": 3, "unit": "C"})), ("now", json!({}))])
            .map(|(text, (name, arguments))| (text, name, arguments))
        {
            for text in [text.clone(), format!("</think>\n\n{text}")] {
                let ids = tokens(&text);
                let mut follower = compiled.follower();
                assert_eq!(follower.count_allowed(&ids), ids.len(), "{parser:?} {text}\n{source}");
                follower.advance(&ids);
                assert!(may_end(&mut follower), "{parser:?} {text}");
            }
            let parts = read(&format, [&*text]);
            let Some(Part::CallBegins { name: called, .. }) = parts.first() else {
                panic!("{parser:?}: {parts:?}")
            };
            let Some(Part::CallArguments { text, .. }) = parts.get(1) else {
                panic!("{parser:?}: {parts:?}")
            };
            assert_eq!(
                (called.as_str(), serde_json::from_str::<Value>(text).unwrap()),
                (name, arguments)
            );
            assert_eq!(parts.len(), 2, "{parser:?}: {parts:?}");
        }
        for wrong in [
            written(parser, "\"x\"")[0].clone(),
            written(parser, "3")[1].replace("now", "then"),
            "Hi".into(),
        ] {
            let ids = tokens(&wrong);
            assert!(compiled.follower().count_allowed(&ids) < ids.len(), "{parser:?} {wrong}");
        }
    }
}

#[test]
fn several_calls_where_they_are_wanted() {
    let vocabulary = vocabulary();
    for (parallel, allowed) in [(true, true), (false, false)] {
        for parser in [ToolParser::Hermes, ToolParser::Llama] {
            let otherwise = Otherwise::Never;
            let form = CallForm { parallel, ..form(parser, otherwise) };
            let source = call_grammar(&functions(), form, special);
            let grammar = Grammar { kind: GrammarKind::Lark, source: source.into() };
            let [one, two] = written(parser, "3");
            let between = if parser == ToolParser::Hermes { "\n" } else { "; " };
            let ids = tokens(&format!("{one}{between}{two}"));
            let got = vocabulary.compile(&grammar).unwrap().follower().count_allowed(&ids);
            assert_eq!(got == ids.len(), allowed);
        }
    }
}

fn allows(vocabulary: &GrammarTokens, source: &str, text: &str) -> bool {
    let grammar = Grammar { kind: GrammarKind::Lark, source: source.into() };
    let compiled = vocabulary.compile(&grammar);
    let compiled = compiled.unwrap_or_else(|error| panic!("{error}\n{source}"));
    let ids = tokens(text);
    let mut follower = compiled.follower();
    if follower.count_allowed(&ids) < ids.len() {
        return false;
    }
    follower.advance(&ids);
    may_end(&mut follower)
}

#[test]
fn calls_in_text_are_held_to_the_schemas_and_text_is_free() {
    let vocabulary = vocabulary();
    for parser in ToolParser::ALL {
        let otherwise = Otherwise::Text;
        let form = form(parser, otherwise);
        let source = call_grammar(&functions(), form, special);
        let [good, now] = written(parser, "3");
        let wrong = &written(parser, "\"x\"")[0];
        let said = if parser == ToolParser::Harmony { "<|channel|>final<|message|>" } else { "" };
        for text in [good.clone(), now.clone(), format!("{said}A (b) <c> {{}}")] {
            assert!(allows(&vocabulary, &source, &text), "{parser:?} {text}\n{source}");
        }
        assert!(!allows(&vocabulary, &source, wrong), "{parser:?} {wrong}\n{source}");
        if !matches!(parser, ToolParser::Llama | ToolParser::Pythonic | ToolParser::Harmony) {
            let both = format!("Let me. {good}\nAnd {now} done");
            assert!(allows(&vocabulary, &source, &both), "{parser:?} {both}\n{source}");
            assert!(!allows(&vocabulary, &source, &format!("Let me. {wrong}")), "{parser:?}");
        }
    }
}

#[test]
fn an_answer_is_a_call_or_json() {
    let vocabulary = vocabulary();
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"], "additionalProperties": false});
    // a call of Llama is JSON, too, and no grammar is made of both
    for parser in ToolParser::ALL.into_iter().filter(|parser| *parser != ToolParser::Llama) {
        let otherwise = Otherwise::Json(&schema);
        let form = form(parser, otherwise);
        let source = call_grammar(&functions(), form, special);
        for (text, want) in [
            (&*written(parser, "3")[0], true),
            (r#"{"a": 1}"#, true),
            (r#"{"a": "1"}"#, false),
            ("Hi", false),
        ] {
            assert_eq!(allows(&vocabulary, &source, text), want, "{parser:?} {text}\n{source}");
        }
    }
}

/// What `required` holds, in a form that writes arguments one by one, and what not.
#[test]
fn references_lengths_and_required_names_are_held_in_every_form() {
    let vocabulary = vocabulary();
    let parameters = json!({
        "type": "object",
        "properties": {
            "child": {"$ref": "#"},
            "short": {"type": "string", "minLength": 1, "maxLength": 2},
            "one": {"type": "string", "const": "x"},
            "same": {"$ref": "#/properties/short"},
        },
        "required": ["n"],
        "additionalProperties": {"type": "integer"},
    });
    let functions = [ForcedFunction { name: "f".into(), parameters }];
    for parser in ToolParser::ALL {
        let source = call_grammar(&functions, form(parser, Otherwise::Never), special);
        for (arguments, want) in [
            (r#"{"n": 1}"#, true),
            (r#"{"short": "ab", "n": 1}"#, true),
            (r#"{"child": {"n": 2}, "n": 1}"#, true),
            (r#"{"one": "x", "same": "é", "n": 1}"#, true),
            (r#"{"child": {}, "n": 1}"#, false),
            (r#"{"short": "abc", "n": 1}"#, false),
            (r#"{"short": "", "n": 1}"#, false),
            (r#"{"same": "abc", "n": 1}"#, false),
            (r#"{"one": "y", "n": 1}"#, false),
            (r#"{"short": "a"}"#, false),
            (r#"{"n": "x"}"#, false),
        ] {
            let text = one_call(parser, arguments);
            assert_eq!(allows(&vocabulary, &source, &text), want, "{parser:?} {text}\n{source}");
        }
    }
}

/// A call of `f` as a form writes it.
fn one_call(parser: ToolParser, arguments: &str) -> String {
    let value: Value = serde_json::from_str(arguments).unwrap();
    let fields = value.as_object().unwrap();
    let each = |write: &dyn Fn(&str, &Value) -> String, between: &str| {
        let mut all: Vec<String> = fields.iter().map(|(key, value)| write(key, value)).collect();
        if matches!(parser, ToolParser::Pythonic | ToolParser::Gemma) {
            all.sort_by_key(|one| !one.starts_with('n')); // what is required comes first
        }
        all.join(between)
    };
    let plain = |key: &str, value: &Value| match value.as_str() {
        Some(text) if key != "same" => text.to_owned(),
        _ => spaced(value),
    };
    match parser {
        ToolParser::QwenCoder => format!(
            "<tool_call>\n<function=f>\n{}</function>\n</tool_call>",
            each(
                &|key, value| format!("<parameter={key}>\n{}\n</parameter>\n", plain(key, value)),
                ""
            )
        ),
        ToolParser::Glm => format!(
            "<tool_call>f\n{}</tool_call>",
            each(
                &|key, value| format!(
                    "<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n",
                    plain(key, value)
                ),
                ""
            )
        ),
        ToolParser::Pythonic => {
            format!("[f({})]", each(&|key, value| format!("{key}={}", spaced(value)), ", "))
        }
        ToolParser::Gemma => format!(
            "<|tool_call>call:f{{{}}}<tool_call|>",
            each(&|key, value| format!("{key}:{}", spaced(value)), ", ")
        ),
        ToolParser::Hermes
        | ToolParser::Llama
        | ToolParser::Mistral
        | ToolParser::DeepseekV3
        | ToolParser::DeepseekV31
        | ToolParser::Kimi
        | ToolParser::Harmony => {
            let [one, _] = written(parser, "3");
            one.replace(r#"{"city": "Bonn", "days": 3, "unit": "C"}"#, arguments)
                .replace("weather", "f")
        }
    }
}

/// As the schemas' own white space allows it.
fn spaced(value: &Value) -> String {
    value.to_string()
}

#[test]
fn calls_of_mistral_stand_as_the_template_writes_them() {
    let vocabulary = vocabulary();
    let listed = r#"[TOOL_CALLS][{"name": "now", "arguments": {}}]"#;
    let named = "[TOOL_CALLS]now[ARGS]{}";
    let with_id = "[TOOL_CALLS]now[CALL_ID]abcdefgh9[ARGS]{}";
    let all = [listed, named, with_id];
    for (mistral, right) in [
        (MistralCalls::Listed, listed),
        (MistralCalls::Named, named),
        (MistralCalls::NamedWithId, with_id),
    ] {
        for otherwise in [Otherwise::Never, Otherwise::Text] {
            let form = CallForm { mistral, ..form(ToolParser::Mistral, otherwise) };
            let source = call_grammar(&functions(), form, special);
            for text in all {
                let allowed = allows(&vocabulary, &source, text);
                assert_eq!(allowed, text == right, "{mistral:?} {text}\n{source}");
            }
            if right != listed {
                let two = format!("{right}{right}");
                assert!(allows(&vocabulary, &source, &two), "{mistral:?} {two}\n{source}");
            }
        }
    }
}

/// Behind reasoning there may be white space; gpt-oss may think in messages first.
#[test]
fn a_call_that_has_to_be_may_stand_behind_reasoning() {
    let vocabulary = vocabulary();
    for parser in ToolParser::ALL {
        let form = CallForm { reasoning: ReasoningFirst::Passed, ..form(parser, Otherwise::Never) };
        let source = call_grammar(&functions(), form, special);
        let [_, now] = written(parser, "3");
        for (before, want) in
            [("", true), ("\n\n", true), ("x", false), ("\n\n\n\n\n\n\n\n\n", false)]
        {
            let text = format!("{before}{now}");
            assert_eq!(allows(&vocabulary, &source, &text), want, "{parser:?} {text:?}");
        }
    }
    let reasoning = ReasoningFirst::Analysis;
    let form = CallForm { reasoning, ..form(ToolParser::Harmony, Otherwise::Never) };
    let source = call_grammar(&functions(), form, special);
    let [_, now] = written(ToolParser::Harmony, "3");
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    for (text, want) in [
        (now.clone(), true),
        (format!("{thought}{now}"), true),
        (format!("{thought}{thought}{now}"), true),
        (thought.to_owned(), false),
        (format!("{}{now}", thought.replace("analysis", "final")), false),
    ] {
        assert_eq!(allows(&vocabulary, &source, &text), want, "{text}\n{source}");
    }
    let source = call_grammar(&functions(), form, |_| None);
    assert!(!source.contains("analysis"), "text could hold what ends it");
}
