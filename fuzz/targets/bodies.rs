//! Bodies of requests to every endpoint that takes one: an answer or an error in the API's form, never a fault of ours.
#![no_main]

use headrace_fuzz::{Stand, abort_on_panic};
use libfuzzer_sys::fuzz_target;

const PATHS: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
];
/// The router never says these of a request: 500 is a fault of ours, 502 is a word of proxies.
const FAULTS: [u16; 2] = [500, 502];

fuzz_target!(|input: &[u8]| {
    abort_on_panic();
    let Some((&choice, body)) = input.split_first() else { return };
    let path = PATHS[usize::from(choice) % PATHS.len()];
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let said = Stand::get().send(&[head.as_bytes(), body].concat());
    let status = said.status().expect("every request is answered");
    assert!(!FAULTS.contains(&status), "{}", String::from_utf8_lossy(&said.bytes));
    if status != 200 {
        let error: serde_json::Value =
            serde_json::from_slice(said.body()).expect("errors are JSON");
        assert!(error["error"]["message"].is_string(), "{error}");
    }
});
