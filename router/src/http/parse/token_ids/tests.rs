//! Every form of the field, what is kept of it, and what it is charged.

use super::*;
use crate::http::parse::json;
use crate::http::parse::params::MAX_CHOICES;
use crate::limits::memory::{MemoryPool, MemoryShare};

const PROMPT: IdsField = IdsField { name: "prompt", most: MAX_CHOICES };
const TOKENS: IdsField = IdsField { name: "tokens", most: 0 };

fn read(body: &str, field: IdsField, memory: &mut MemoryShare) -> Option<Ids> {
    json::parse(body.as_bytes(), Some(field), memory).unwrap().ids
}

fn of(body: &str, field: IdsField) -> Option<Ids> {
    read(body, field, &mut MemoryPool::private(1 << 20).share())
}

fn tokens(list: &str) -> Result<Vec<u32>, String> {
    let Some(Ids::List(list)) = of(&format!("{{\"tokens\": {list}}}"), TOKENS) else {
        panic!("{list}")
    };
    list.check("tokens", 100).map_err(|error| error.to_string())
}

#[test]
fn ids_are_whole_numbers_below_the_vocabulary() {
    assert_eq!(tokens("[]").unwrap(), [0; 0]);
    assert_eq!(tokens("[0, 99, 16.0, -0.0]").unwrap(), [0, 99, 16, 0]);
    for (list, error) in [
        ("[1, 100]", "`tokens[1]` must be between 0 and 99, not 100"),
        ("[1, -1, \"a\"]", "`tokens[1]` must be between 0 and 99, not -1"),
        ("[100, \"a\"]", "`tokens[0]` must be between 0 and 99, not 100"),
        ("[1, 1.5]", "`tokens[1]` must be an integer, not 1.5"),
        ("[4294967296]", "`tokens[0]` must be between 0 and 99, not 4294967296"),
        ("[1e30]", "`tokens[0]` must be between 0 and 99, not 1e+30"),
        (
            "[18446744073709551615]",
            "`tokens[0]` must be between 0 and 99, not 18446744073709551615",
        ),
        ("[\"a\"]", "`tokens[0]` must be an integer, not a string"),
        ("[1, [2], {}]", "`tokens[1]` must be an integer, not an array"),
        ("[1, {\"a\": [1, {}]}]", "`tokens[1]` must be an integer, not an object"),
        ("[1, null]", "`tokens[1]` must be an integer, not null"),
        ("[true]", "`tokens[0]` must be an integer, not a boolean"),
    ] {
        assert_eq!(tokens(list).unwrap_err(), error);
    }
}

#[test]
fn the_field_is_apart_from_the_others_and_only_at_the_top() {
    let memory = &mut MemoryPool::private(1 << 20).share();
    let body = br#"{"a": {"prompt": [1]}, "prompt": [2], "b": 3}"#;
    let document = json::parse(body, Some(PROMPT), memory).unwrap();
    assert_eq!(document.value, serde_json::json!({"a": {"prompt": [1]}, "b": 3}));
    assert!(matches!(document.ids, Some(Ids::List(list)) if list.ids == [2]));
    assert!(of(r#"{"prompt": null}"#, PROMPT).is_none() && of("{}", PROMPT).is_none());
    for twice in [r#"{"prompt": [1], "prompt": [1]}"#, r#"{"prompt": null, "prompt": 1}"#] {
        let error = json::parse(twice.as_bytes(), Some(PROMPT), memory).unwrap_err();
        assert!(error.to_string().contains("`prompt` is there twice"), "{error}");
    }
}

#[test]
fn the_first_item_says_what_a_prompt_is() {
    let prompt = |json: &str| of(&format!("{{\"prompt\": {json}}}"), PROMPT).unwrap();
    assert!(matches!(prompt("\"a\""), Ids::Text(text) if text == "a"));
    assert!(matches!(prompt("[]"), Ids::List(list) if list.is_empty()));
    assert!(matches!(prompt("[\"a\", \"b\"]"), Ids::Texts(texts) if texts.items == ["a", "b"]));
    let Ids::Lists(lists) = prompt("[[1], [2, 3], 4, [5]]") else { panic!("lists") };
    assert_eq!((lists.items.len(), lists.len, lists.odd), (2, 4, Some((2, 4.into()))));
    let Ids::Odd { first, len } = prompt("[null, 1, \"a\"]") else { panic!("odd") };
    assert_eq!((first, len), (Value::Null, 3));
    assert!(matches!(prompt("{\"a\": []}"), Ids::Other(Value::Object(_))));
}

#[test]
fn more_prompts_than_there_may_be_are_counted_and_not_kept() {
    let body = format!("{{\"prompt\": [{}]}}", vec!["\"a\""; 5000].join(","));
    let Some(Ids::Texts(texts)) = of(&body, PROMPT) else { panic!("texts") };
    assert_eq!((texts.items.len(), texts.len), (MAX_CHOICES, 5000));
}

#[test]
fn an_id_is_charged_a_few_bytes_and_what_is_wrong_nothing() {
    let mut memory = MemoryPool::private(1 << 20).share();
    let body = format!("{{\"prompt\": [{}]}}", vec!["7"; 50_000].join(","));
    assert!(
        matches!(read(&body, PROMPT, &mut memory), Some(Ids::List(list)) if list.len() == 50_000)
    );
    assert!(memory.peak() < 500_000, "{}", memory.peak());
    let mut memory = MemoryPool::private(1 << 20).share();
    let nested = format!("{{\"prompt\": [1, {}]}}", vec!["[[0]]"; 50_000].join(","));
    read(&nested, PROMPT, &mut memory);
    assert!(memory.peak() < 1_000, "{}", memory.peak());
}

#[test]
fn texts_and_lists_are_charged_for_what_is_kept_of_them() {
    for (item, each) in [("\"0123456789abcdef\"", 16 + 16 + 24), ("[7,8]", 8 + 16 + 32)] {
        let mut memory = MemoryPool::private(1 << 20).share();
        let body = format!("{{\"prompt\": [{}]}}", vec![item; MAX_CHOICES].join(","));
        read(&body, PROMPT, &mut memory);
        let takes = MAX_CHOICES * each;
        assert!(
            (takes..2 * takes).contains(&memory.used()),
            "{item}: {} for {takes}",
            memory.used()
        );
    }
    let mut memory = MemoryPool::private(1 << 20).share();
    read(&format!("{{\"prompt\": \"{}\"}}", "x".repeat(5_000)), PROMPT, &mut memory);
    assert!((5_000..5_200).contains(&memory.used()), "{}", memory.used());
}

#[test]
fn ids_beyond_the_memory_of_a_request_are_refused_with_their_place() {
    let mut memory = MemoryPool::private(100_000).share();
    let body = format!("{{\"prompt\": [[{}]]}}", vec!["7"; 50_000].join(","));
    match json::parse(body.as_bytes(), Some(PROMPT), &mut memory) {
        Err(RouteError::BodyTooComplex { limit: 100_000, param: Some(param) }) => {
            assert!(param.starts_with("prompt[0]["), "{param}");
        }
        other => panic!("{other:?}"),
    }
}
