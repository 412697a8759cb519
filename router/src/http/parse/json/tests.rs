//! The strict reader, and what it charges.

use super::*;
use crate::limits::memory::MemoryPool;

fn read(body: &[u8]) -> Result<Value, RouteError> {
    parse(body, None, &mut MemoryPool::private(1 << 20).share()).map(|document| document.value)
}

fn error_of(body: &[u8]) -> (Option<String>, String) {
    match read(body) {
        Err(RouteError::BadRequest { param, message }) => (param, message),
        other => panic!("expected BadRequest, got {other:?}"),
    }
}

#[test]
fn good_documents_are_read_as_serde_json_reads_them() {
    for text in [r#"{"a":[1,-2,3.5,true,null,"\ud83d\ude00"],"b":{"a":{}}}"#, " 7 ", r#""x""#] {
        assert_eq!(read(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
    }
}

#[test]
fn a_key_there_twice_is_named_with_its_path() {
    assert_eq!(error_of(br#"{"a":1,"a":2}"#).0.unwrap(), "a");
    let (param, message) = error_of(br#"{"messages":[{},{"role":"user","role":"system"}]}"#);
    assert_eq!(param.unwrap(), "messages[1].role");
    assert!(message.contains("`messages[1].role`"));
}

#[test]
fn broken_text_is_an_error_with_a_place() {
    for (body, part) in [
        (&b"{\"a\": \n tru}"[..], "line 2 column"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{\"a\": NaN}", "line 1 column"),
        (b"{\"a\": Infinity}", "line 1 column"),
        (b"{\"a\": 1e999}", "number out of range"),
        (b"{\"a\": \"\xff\"}", "byte 7"),
        (br#"{"a": "\ud800"}"#, "line 1 column"),
        (br#"{"a": "\udc00x"}"#, "surrogate"),
        (b"{} {}", "trailing"),
        (b"{\"a\": 1", "EOF"),
    ] {
        let (param, message) = error_of(body);
        assert_eq!(param, None, "{message}");
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn deep_nesting_ends_early_with_a_short_message() {
    let (_, message) = error_of("[".repeat(10_000).as_bytes());
    assert!(message.contains("deeper than 64 levels") && message.len() < 320, "{message}");
    let (_, message) = error_of("{\"a\":".repeat(10_000).as_bytes());
    assert!(message.contains("deeper than 64 levels") && message.len() < 320, "{message}");
}

#[test]
fn as_deep_as_may_be_is_read_and_one_level_more_is_not() {
    let lists = |deep: usize| format!("{}{}", "[".repeat(deep), "]".repeat(deep));
    let objects = |deep: usize| format!("{}1{}", "{\"a\":".repeat(deep), "}".repeat(deep));
    assert!(read(lists(64).as_bytes()).is_ok() && read(objects(64).as_bytes()).is_ok());
    let place = "[0]".repeat(64);
    let (param, message) = error_of(lists(65).as_bytes());
    assert!(message.contains("deeper than 64 levels") && place.starts_with(&param.unwrap()[..99]));
    assert!(error_of(objects(65).as_bytes()).1.contains("deeper than 64 levels"));
}

/// What is charged for `body` while it is read, at most, and afterwards.
fn charged(body: &str) -> (usize, usize) {
    let mut memory = MemoryPool::private(64 << 20).share();
    parse(body.as_bytes(), None, &mut memory).unwrap();
    (memory.peak(), memory.used())
}

fn repeated(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

#[test]
fn values_are_charged_for_what_is_allocated_for_them_and_little_more() {
    const VALUE: usize = size_of::<Value>();
    let count = 1 << 14; // at this length a list is full, but for what doubling leaves
    for (what, item, each) in [
        ("numbers", "7", 0),
        ("texts", r#""0123456789abcdef0123456789abcdef""#, 32 + ALLOCATION_BYTES),
        ("texts with escapes", r#""0123456789abcdef0123456789abcde\n""#, 32 + ALLOCATION_BYTES),
        ("short texts", r#""a""#, 1 + ALLOCATION_BYTES),
        ("lists", "[7]", 2 * VALUE + ALLOCATION_BYTES),
        ("empty ones", "[[],{}]", 2 * VALUE + ALLOCATION_BYTES),
    ] {
        let (_, used) = charged(&repeated(item, count));
        let takes = count * (VALUE + each);
        assert!((takes..takes + takes / 8 + 256).contains(&used), "{what}: {used} for {takes}");
    }
}

#[test]
fn objects_are_charged_for_their_keys_and_their_tables() {
    const ENTRY: usize = size_of::<(usize, String, Value)>() + size_of::<usize>() + 1;
    const KEY: usize = 32;
    for (count, room) in [(14 << 10, 9), (13 << 10, 9), (8 << 10, 16)] {
        let key = |i: usize| format!("\"{i:0>KEY$}\":7");
        let entries: Vec<String> = (0..count).map(key).collect();
        let (_, used) = charged(&format!("{{{}}}", entries.join(",")));
        let takes = count * (ENTRY + KEY + ALLOCATION_BYTES);
        // `room` eighths of the entries, as the tables double
        assert!((takes..takes * room / 8 + 512).contains(&used), "{count}: {used} for {takes}");
    }
    let (_, small) = charged(&repeated(r#"{"a":7}"#, 1 << 10));
    let least = (1 << 10) * (size_of::<Value>() + 3 * ENTRY + 1 + 3 * ALLOCATION_BYTES);
    assert!((least..least + least / 4).contains(&small), "{small} for {least}");
}

#[test]
fn a_list_and_an_object_that_move_are_charged_twice_for_a_moment() {
    for body in [
        repeated("7", (1 << 14) + 1),
        format!(
            "{{{}}}",
            (0..(14 << 10) + 1).map(|i| format!("\"{i}\":7")).collect::<Vec<_>>().join(",")
        ),
    ] {
        let (peak, used) = charged(&body);
        assert!(peak > used + used / 4, "{peak} at its peak, {used} afterwards");
    }
}

#[test]
fn the_buffer_for_texts_with_escapes_is_charged_while_it_is_there() {
    let text = format!("{}\\n", "x".repeat(100_000));
    let (peak, used) = charged(&format!("[\"{text}\"]"));
    assert!((100_000..101_000).contains(&used), "{used}");
    assert!(peak >= 300_000, "{peak}: the buffer doubles");
    let (twice, _) = charged(&format!("[\"{text}\",\"{text}\"]"));
    assert!(twice < peak + 101_000, "{twice}: there is one such buffer");
    let (plain, _) = charged(&format!("[\"{}\"]", "x".repeat(100_000)));
    assert!(plain < 101_000, "{plain}: it is not needed");
    let (key, _) = charged(&format!("{{\"{text}\":7}}"));
    assert!(key >= 300_000, "{key}");
}

#[test]
fn a_text_inside_the_body_is_an_object_or_costs_nothing() {
    let mut memory = MemoryPool::private(1 << 20).share();
    memory.charge(1_000).unwrap();
    for none in [r#"["long enough to be charged"]"#, "7", "{\"a\":", "no JSON", r#"{"a":[1,2}"#] {
        assert!(parse_inner(none, "arguments", &mut memory).unwrap().is_none());
        assert_eq!(memory.used(), 1_000, "{none}");
    }
    let twice = parse_inner(r#"{"a":1,"a":2}"#, "arguments", &mut memory).unwrap().unwrap();
    assert_eq!(twice["a"], 2, "as for everybody who reads it");
    assert!(memory.used() > 1_000);
    let long = format!("{{\"a\":\"{}\"}}", "x".repeat(2 << 20));
    match parse_inner(&long, "arguments", &mut memory) {
        Err(RouteError::BodyTooComplex { param: Some(param), .. }) => {
            assert_eq!(param, "arguments.a");
        }
        other => panic!("{other:?}"),
    }
}
