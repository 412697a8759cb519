//! The strict reader, and what it charges.

use super::*;
use crate::memory::Pool;

fn read(body: &[u8]) -> Result<Value, RouteError> {
    parse(body, None, &mut Pool::private(1 << 20).share()).map(|document| document.value)
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
