//! Templates that both engines render, or refuse, in the same words.

use super::{Json, json, object, oracle, render};

const TEMPLATES: &str = include_str!("../../../../../tests/data/chat_templates.json");

#[test]
fn families_of_templates_render_the_same() {
    let data: Json = serde_json::from_str(TEMPLATES).unwrap();
    for case in data["cases"].as_array().unwrap() {
        let source = data["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        let source = source.replace("endgeneration", "endwith").replace("generation %}", "with %}");
        let mut given = object(case["kwargs"].clone());
        for name in ["messages", "tools", "add_generation_prompt"] {
            given.insert(name.to_owned(), case[name].clone());
        }
        given.insert("bos_token".to_owned(), json!("<s>"));
        given.insert("eos_token".to_owned(), json!("</s>"));
        if source.contains("strftime_now") {
            continue; // the oracle has no clock
        }
        assert_eq!(render(&source, &given), oracle::render(&source, &given), "{given:?}");
    }
}

/// What the snippets below may read.
pub(super) fn given() -> serde_json::Map<String, Json> {
    object(json!({
        "n": 3, "big": 18_446_744_073_709_551_615_u64, "x": 2.5, "e": 1e300, "yes": true, "no": null,
        "s": "The river\n  runs 'down' to the mill ", "u": "Straße İstanbul ΟΔΟΣ é 🙂", "empty": "",
        "list": [3, 1, 2, 1], "words": ["b", "A", "a", "C"], "nested": [[1, [2]], {"k": [null, true]}],
        "map": {"z": 1, "a": {"b": [10, 20]}, "items": 5},
        "people": [
            {"name": "Ann", "age": 3, "at": {"x": 1}}, {"name": "bob", "age": 1},
            {"name": "Cid", "age": 3, "at": {"x": 0}},
        ],
    }))
}

#[test]
fn snippets_render_the_same() {
    let mut differ = Vec::new();
    for source in include_str!("snippets.txt").split("\n---\n") {
        let source = source.trim_end_matches('\n');
        let (ours, theirs) = (render(source, &given()), oracle::render(source, &given()));
        if ours != theirs {
            differ.push(format!("{source}\n  ours   {ours:?}\n  theirs {theirs:?}"));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}
