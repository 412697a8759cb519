//! Tenants apart: what is cached of a prompt, and what is remembered of a request, is its tenant's own.

use std::num::NonZeroUsize;

use headrace_router::config::RouterArgs;
use headrace_router::core::blocks::{BlockHash, hash_blocks};
use headrace_router::core::frame::{Blocks, Finish, Frame, StoredRun, Submit};
use headrace_router::core::secret::HashKey;
use serde_json::{Value, json};

use super::client::{Reply, TestRouter, args};
use crate::fake_worker::*;

fn keyed(change: impl FnOnce(&mut RouterArgs)) -> RouterArgs {
    let mut args = RouterArgs {
        api_key: vec!["a1".into(), "bob b1".into(), "bob b2".into()],
        admin_key: vec!["op".into()],
        ..args()
    };
    change(&mut args);
    args
}

fn head(path: &str, headers: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\n{headers}")
}

/// Asks with these headers for an answer to one long prompt, which the worker gives; the answer, and what the worker got.
async fn ask(
    router: &TestRouter,
    worker: &mut FakeWorker,
    headers: &str,
    extra: &Value,
) -> (Reply, Submit) {
    let prompt: Vec<u32> = (3..103).collect();
    let mut body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 4});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let mut connection = router.connect().await;
    let headers = format!("{headers}\r\nX-Headrace-Explain: 1");
    connection.request(&head("/v1/completions", &headers), body.to_string().as_bytes()).await;
    let submit = worker.submitted().await;
    worker.gives(submit.request, &[EOS], Some(Finish::Stop));
    let reply = connection.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    (reply, submit)
}

/// Tokens of the prompt that the router takes for cached.
fn cached(reply: &Reply) -> u64 {
    let decision: Value =
        serde_json::from_str(reply.header("x-headrace-decision").unwrap()).unwrap();
    decision["candidates"][0]["cached_tokens"].as_u64().unwrap()
}

/// Announces the blocks of a prompt as a worker does that computed it.
async fn stored(
    router: &TestRouter,
    worker: &FakeWorker,
    epoch: u64,
    sequence: u64,
    submit: &Submit,
) {
    let key = HashKey(worker.welcome.hash_key.as_slice().try_into().unwrap());
    let tokens = submit.tokens.chunks_exact(4);
    let tokens: Vec<u32> = tokens.map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect();
    let (root, block) = (BlockHash::root(&key, &submit.salt), NonZeroUsize::new(16).unwrap());
    let hashes = hash_blocks(&key, root, &tokens, block);
    let hashes = hashes.iter().flat_map(|hash| hash.key().0.to_le_bytes()).collect();
    let stored = vec![StoredRun { parent: None, hashes }];
    let (removed, cleared) = (Vec::new(), false);
    worker.send(Frame::Blocks(Blocks { epoch, sequence, stored, removed, cleared, tier: 0 }));
    let blocks = 6.0 * sequence as f64;
    until("its blocks are known", || metric(&router.app, "headrace_index_blocks", "") >= blocks)
        .await;
}

const A: &str = "Authorization: Bearer a1";
const BOB: &str = "Authorization: Bearer b1";
const BOB_TOO: &str = "Authorization: Bearer b2";

#[tokio::test]
async fn key_b_does_not_learn_what_a_asked() {
    let behaviour = Behaviour::new("w");
    let epoch = behaviour.hello.epoch;
    let (router, mut worker) = TestRouter::with(behaviour, keyed(|_| {})).await;
    let (_, of_a) = ask(&router, &mut worker, A, &json!({})).await;
    stored(&router, &worker, epoch, 1, &of_a).await;
    let (reply, again) = ask(&router, &mut worker, A, &json!({})).await;
    assert_eq!((cached(&reply), &again.salt), (96, &of_a.salt));
    // B sees no hit, and neither does the worker find one, whatever B says of itself
    let salt = json!({"cache_salt": "x"});
    for (headers, extra) in [(BOB, json!({})), (BOB, salt.clone())] {
        let headers = format!("{headers}\r\nX-Headrace-Tenant: a1\r\nX-Session-ID: s");
        let (reply, of_b) = ask(&router, &mut worker, &headers, &extra).await;
        assert_eq!(cached(&reply), 0);
        assert_ne!(of_b.salt, of_a.salt);
    }
    // two keys of one tenant share, salts of a client's own are kept apart
    let (_, of_b) = ask(&router, &mut worker, BOB, &json!({})).await;
    stored(&router, &worker, epoch, 2, &of_b).await;
    let (reply, _) = ask(&router, &mut worker, BOB_TOO, &json!({})).await;
    assert_eq!(cached(&reply), 96);
    let (reply, _) = ask(&router, &mut worker, BOB_TOO, &salt).await;
    assert_eq!(cached(&reply), 0);
}

/// Stretches of text whose tokens the router knew.
fn known_texts(router: &TestRouter) -> f64 {
    metric(&router.app, HITS, "")
}

const HITS: &str = "headrace_prompt_cache_hits_total";

#[tokio::test]
async fn nor_does_b_learn_it_from_the_tokenizer() {
    let (router, _worker) = TestRouter::with(Behaviour::new("w"), keyed(|_| {})).await;
    let text =
        "<|im_end|>A secret of A, which is as long as what is worth to be remembered. ".repeat(8);
    let body = json!({"model": MODEL, "prompt": text}).to_string();
    let hits = async |headers: &str| {
        let before = known_texts(&router);
        let reply = router.send(&head("/tokenize", headers), body.as_bytes()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        known_texts(&router) - before
    };
    let first = hits(A).await;
    assert!(hits(A).await > first);
    assert_eq!(hits(BOB).await, first);
    assert!(hits(BOB_TOO).await > first);
}

#[tokio::test]
async fn tenants_share_where_configuration_says_so() {
    let behaviour = Behaviour::new("w");
    let epoch = behaviour.hello.epoch;
    let shared = keyed(|args| args.cache_sharing = "all".into());
    let (router, mut worker) = TestRouter::with(behaviour, shared).await;
    let (_, of_a) = ask(&router, &mut worker, A, &json!({})).await;
    assert_eq!(of_a.salt, b"");
    stored(&router, &worker, epoch, 1, &of_a).await;
    let (reply, _) = ask(&router, &mut worker, BOB, &json!({})).await;
    assert_eq!(cached(&reply), 96);
}

#[tokio::test]
async fn without_keys_everybody_shares_whatever_name_they_give() {
    let behaviour = Behaviour::new("w");
    let epoch = behaviour.hello.epoch;
    let (router, mut worker) = TestRouter::with(behaviour, args()).await;
    let (_, of_a) = ask(&router, &mut worker, "X-Headrace-Tenant: a", &json!({})).await;
    stored(&router, &worker, epoch, 1, &of_a).await;
    let (reply, _) = ask(&router, &mut worker, "X-Headrace-Tenant: b", &json!({})).await;
    assert_eq!(cached(&reply), 96);
}

#[tokio::test]
async fn decisions_are_seen_by_their_tenant_and_by_operators() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), keyed(|_| {})).await;
    // both choose the same id
    for headers in [A, BOB] {
        ask(&router, &mut worker, &format!("{headers}\r\nX-Request-ID: same"), &json!({})).await;
    }
    ask(&router, &mut worker, &format!("{A}\r\nX-Request-ID: only-a"), &json!({})).await;
    let seen = async |id: &str, headers: &str| {
        let head = format!("GET /decisions/{id} HTTP/1.1\r\n{headers}");
        let reply = router.send(&head, b"").await;
        let body = reply.json();
        match reply.status {
            200 => body["decisions"].as_array().unwrap().len(),
            404 => {
                assert_eq!(body["error"]["code"], "unknown_request");
                0
            }
            status => panic!("{status} {body}"),
        }
    };
    assert_eq!(
        (seen("same", A).await, seen("same", BOB).await, seen("same", BOB_TOO).await),
        (1, 1, 1)
    );
    assert_eq!((seen("only-a", A).await, seen("only-a", BOB).await), (1, 0));
    let operator = "Authorization: Bearer op";
    assert_eq!((seen("same", operator).await, seen("only-a", operator).await), (2, 1));
    let head = format!("GET /decisions/same HTTP/1.1\r\n{operator}");
    let both = router.send(&head, b"").await.json();
    let names = [0, 1].map(|i| both["decisions"][i]["tenant"].as_str().unwrap().to_owned());
    assert!(names[0].len() == 16 && names[1] == "bob", "{names:?}");
    for headers in ["X-A: b", "Authorization: Bearer wrong", "Authorization: Basic a1"] {
        let head = format!("GET /decisions/only-a HTTP/1.1\r\n{headers}");
        assert_eq!(router.send(&head, b"").await.status, 401, "{headers}");
    }
}

#[tokio::test]
async fn decisions_name_the_tenant_that_the_client_named() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    for tenant in ["X-Headrace-Tenant: alice", "X-Headrace-Tenant: bob", "X-A: b"] {
        ask(&router, &mut worker, &format!("{tenant}\r\nX-Request-ID: r1"), &json!({})).await;
    }
    let decisions = router.get("/decisions/r1").await.json()["decisions"].clone();
    let names: Vec<&Value> =
        decisions.as_array().unwrap().iter().map(|one| &one["tenant"]).collect();
    assert_eq!(names, [&json!("alice"), &json!("bob"), &Value::Null]);
}
