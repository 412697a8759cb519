//! Who may join: every wrong Hello, secrets, TLS, duplicates, and dials that are no handshake at all.

use std::error::Error as _;
use std::time::Duration;

use headrace_router::core::frame::*;
use headrace_router::core::secret::{AuthKey, Side};
use tokio::time::timeout;

use crate::fake_worker::*;

async fn refused(app: &headrace_router::app::App, change: impl FnOnce(&mut Hello)) -> Box<Refuse> {
    let mut behaviour = Behaviour::new("refused");
    change(&mut behaviour.hello);
    let refuse = behaviour.join(app).await.expect_err("it may not join");
    assert!(!refuse.message.is_empty());
    refuse
}

#[tokio::test]
async fn every_wrong_hello_is_refused_by_field_with_both_values() {
    let app = start_router(|_| {}).await;
    type Change = fn(&mut Hello);
    let cases: [(&str, &str, Change); 31] = [
        ("dtype", "", |h| h.dtype = String::new()),
        ("dtype", "int8\u{7}", |h| h.dtype = "int8\u{7}".into()),
        ("worker", "", |h| h.worker = String::new()),
        ("worker", "a\nb", |h| h.worker = "a\nb".into()),
        ("model", "", |h| h.model = String::new()),
        ("fingerprints.weights", "", |h| h.fingerprints.weights = String::new()),
        ("fingerprints.tokenizer", "", |h| h.fingerprints.tokenizer = String::new()),
        ("fingerprints.chat_template", "", |h| h.fingerprints.chat_template = String::new()),
        ("fingerprints.kv_layout", "", |h| h.fingerprints.kv_layout = String::new()),
        ("fingerprints.hash_scheme", "md5", |h| h.fingerprints.hash_scheme = "md5".into()),
        ("fingerprints.block_tokens", "0", |h| h.fingerprints.block_tokens = 0),
        ("transfer", "0 ways", |h| h.role = Role::Prefill),
        ("kv_block_bytes", "18446744073709551615", |h| h.kv_block_bytes = u64::MAX),
        ("capacity.blocks", "0", |h| h.capacity.blocks = 0),
        ("capacity.blocks", "1073741824", |h| h.capacity.blocks = 1 << 30),
        ("step_prior", "[0.0, 0.0, 0.0, 0.0, 0.0]", |h| {
            let (fixed_ms, prefill_ms, context_ms, row_ms, kv_ms) = (0.0, 0.0, 0.0, 0.0, 0.0);
            h.step_prior = Some(StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms });
        }),
        ("capacity.sequences", "4294967295", |h| h.capacity.sequences = u32::MAX),
        ("capacity.batched_tokens", "0", |h| h.capacity.batched_tokens = 0),
        ("capacity.disk_blocks", "4294967295", |h| h.capacity.disk_blocks = u32::MAX),
        ("step_prior", "[1.0, -1.0, 0.0, 0.0, 0.0]", |h| {
            let (fixed_ms, prefill_ms, context_ms, row_ms, kv_ms) = (1.0, -1.0, 0.0, 0.0, 0.0);
            h.step_prior = Some(StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms });
        }),
        ("context_tokens", "0", |h| h.context_tokens = 0),
        ("group", "rank 2 of 2", |h| h.group = Some(rank_of("g", 2, 2))),
        ("group", "rank 7 of 100000", |h| h.group = Some(rank_of("g", 7, 100_000))),
        ("group.id", "", |h| h.group = Some(rank_of("", 0, 2))),
        ("group.transport", "\u{7}", |h| {
            h.group = Some(Group { transport: "\u{7}".into(), ..rank_of("g", 0, 2) });
        }),
        ("nonce", "3 bytes", |h| h.nonce = vec![1, 2, 3]),
        ("step_prior", "[inf, 0.0, 0.0, 0.0, 0.0]", |h| {
            let (fixed_ms, prefill_ms, context_ms, row_ms, kv_ms) =
                (f64::INFINITY, 0.0, 0.0, 0.0, 0.0);
            h.step_prior = Some(StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms });
        }),
        ("transfer", "17 ways", |h| h.transfer = vec!["tcp:host:1".into(); 17]),
        ("transfer", "2 ways", |h| h.transfer = vec!["tcp:host:1".into(), "host".into()]),
        ("transfer", "1 ways", |h| h.transfer = vec![format!("tcp:{}", "h".repeat(300))]),
        ("transfer", "1 ways", |h| {
            (h.role, h.kv_block_bytes, h.transfer) = (Role::Prefill, 0, vec!["tcp:host:1".into()]);
        }),
    ];
    for (field, got, change) in cases {
        let refuse = refused(&app, change).await;
        assert_eq!((refuse.field.as_str(), refuse.got.as_str()), (field, got));
        assert!(!refuse.expected.is_empty(), "{field}");
        assert_eq!((refuse.reason, refuse.retry_after_ms), (RefuseReason::BadHello, None));
        assert!(refuse.router.starts_with("router-"), "{refuse:?}");
    }
    let reason = "refused_bad_hello";
    until(reason, || metric(&app, "headrace_link_errors_total", reason) == 31.0).await;
    assert_eq!(app.fleet.workers()["workers"], serde_json::json!([]));
}

/// A Hello of version 1 as its release wrote it: 13 fields, without `dtype`.
const HELLO_OF_VERSION_1: &[u8] = b"\x9e\x01\x01\xa8worker-0\xcf\x00\x00\x01\xa0\xc4\x50\x6c\x00\xa4both\xb5SmolLM2-135M-Instruct\
    \x96\xa4w-01\xa4t-02\xa4c-03\xa5kv-04\xafblake3-chain-v2\x10\x96\xcd\x10\x00\x40\xcd\x08\x00\xcd\x01\x00\x00\x00\
    \xcd\x20\x00\xc0\x90\xc4\x10\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\xc0\x00";

#[tokio::test]
async fn a_worker_of_another_version_is_refused_by_name_in_a_frame_that_it_can_read() {
    let app = start_router(|_| {}).await;
    let refused = async |hello: &[u8]| {
        let (mut reader, mut writer) = dial(app.fleet.address()).await;
        let frame = [&u32::try_from(hello.len()).unwrap().to_le_bytes()[..], hello].concat();
        writer.raw(&frame).await.unwrap();
        let answer = receive(&mut reader).await;
        assert_eq!(receive(&mut reader).await, None);
        answer
    };
    let message =
        "this router speaks version 9 of the protocol and this worker version 1: update the worker";
    let Some(Frame::OtherVersion(told)) = refused(HELLO_OF_VERSION_1).await else { panic!() };
    assert_eq!((told.field.as_str(), told.message.as_str()), ("protocol", message));
    assert_eq!((told.expected.as_str(), told.got.as_str()), ("9", "1"));
    // what version 1 knew as `Refuse`: number 33 and four texts, byte for byte
    let mut body = Vec::new();
    headrace_router::fleet::codec::encode(&Frame::OtherVersion(told), &mut body).unwrap();
    let texts =
        [&b"\x95\x21\xa8protocol\xa19\xa11\xd9"[..], &[message.len() as u8], message.as_bytes()];
    assert_eq!(body, texts.concat());
    // of a version to come only the number is read
    let later = [&b"\x94\x01\xcd\x01\x00"[..], b"\xa1w\x80"].concat();
    let Some(Frame::OtherVersion(told)) = refused(&later).await else { panic!() };
    assert_eq!(told.got, "256");
    assert!(told.message.ends_with("update the router"), "{told:?}");
    let reason = "refused_protocol";
    until(reason, || metric(&app, "headrace_link_errors_total", reason) == 2.0).await;
    assert_eq!(app.fleet.workers()["workers"], serde_json::json!([]));
}

#[tokio::test]
async fn workers_of_one_model_must_agree() {
    let app = start_router(|_| {}).await;
    let first = Behaviour::new("w1").ready(&app).await;
    type Change = fn(&mut Fingerprints);
    let cases: [(&str, &str, &str, Change); 5] = [
        ("weights", "weights-1", "other", |f| f.weights = "other".into()),
        ("tokenizer", "tokenizer-1", "other", |f| f.tokenizer = "other".into()),
        ("chat_template", "template-1", "other", |f| f.chat_template = "other".into()),
        ("kv_layout", "layout-1", "other", |f| f.kv_layout = "other".into()),
        ("block_tokens", "16", "32", |f| f.block_tokens = 32),
    ];
    for (n, (field, expected, got, change)) in cases.into_iter().enumerate() {
        let refuse = refused(&app, |hello| change(&mut hello.fingerprints)).await;
        assert_eq!(refuse.field, format!("fingerprints.{field}"));
        assert_eq!((refuse.expected.as_str(), refuse.got.as_str()), (expected, got));
        assert_eq!((refuse.reason, refuse.retry_after_ms), (RefuseReason::Mismatch, None));
        let (reason, times) = ("refused_mismatch", (n + 1) as f64);
        until(reason, || metric(&app, "headrace_link_errors_total", reason) == times).await;
        assert_eq!(state_of(&app, "w1"), "ready");
    }
    // another name is another model
    let mut other = Behaviour::new("w2");
    other.hello.model = "other".into();
    other.hello.fingerprints.weights = "other".into();
    let _other = other.ready(&app).await;
    let models = app.fleet.models();
    assert_eq!(models.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), [MODEL, "other"]);
    // without workers the name is free for other weights
    drop(first);
    until("w1 is gone", || state_of(&app, "w1").is_empty()).await;
    let mut next = Behaviour::new("w3");
    next.hello.fingerprints.weights = "next".into();
    let _next = next.ready(&app).await;
}

#[tokio::test]
async fn a_description_is_asked_for_once_and_of_another_worker_if_the_first_is_lost() {
    let app = start_router(|_| {}).await;
    let mut silent =
        Behaviour { describes: false, ..Behaviour::new("w1") }.join(&app).await.unwrap();
    assert!(
        matches!(silent.event().await, Event::Describe(print) if print == "tokenizer-1/template-1")
    );
    let mut second = Behaviour::new("w2").join(&app).await.unwrap();
    until("w2 joined", || state_of(&app, "w2") == "joining").await;
    assert!(second.so_far().is_empty(), "one is enough");
    assert!(app.fleet.models().is_empty() && !app.fleet.ready());
    drop(silent);
    assert!(matches!(second.event().await, Event::Describe(_)));
    until("w2 is ready", || state_of(&app, "w2") == "ready").await;
    let mut third = Behaviour::new("w3").ready(&app).await;
    assert!(third.so_far().is_empty(), "it is known");
    assert!(app.fleet.ready());
    assert_eq!(app.fleet.models()[0].context_tokens, CONTEXT_TOKENS);
}

#[tokio::test]
async fn a_description_of_no_use_closes_the_link_by_name() {
    for doc in [b"{".to_vec(), b"{}".to_vec(), br#"{"tokenizer": "x"}"#.to_vec()] {
        let app = start_router(|_| {}).await;
        let mut worker = Behaviour { doc, ..Behaviour::new("w1") }.join(&app).await.unwrap();
        worker.closed().await;
        until("the reason", || metric(&app, "headrace_link_errors_total", "\"model\"") > 0.0).await;
        assert!(!app.fleet.ready());
    }
    let part = |fingerprint: &str, part, len| {
        let (fingerprint, data) = (fingerprint.to_owned(), vec![b' '; len]);
        Frame::Model(ModelPart { fingerprint, part, last: false, data })
    };
    for wrong in [part("another", 0, 1), part("tokenizer-1/template-1", 1, 1)] {
        let app = start_router(|_| {}).await;
        let behaviour = Behaviour { describes: false, ..Behaviour::new("w1") };
        let mut worker = behaviour.join(&app).await.unwrap();
        worker.event().await;
        worker.send(wrong);
        worker.closed().await;
    }
    let app = start_router(|args| args.describe_timeout_ms = 50).await;
    let behaviour = Behaviour { describes: false, ..Behaviour::new("w1") };
    behaviour.join(&app).await.unwrap().closed().await;
}

#[tokio::test]
async fn a_worker_is_ready_only_with_its_snapshot() {
    let app = start_router(|_| {}).await;
    let behaviour = Behaviour { snapshots: false, ..Behaviour::new("w1") };
    let epoch = behaviour.hello.epoch;
    let worker = behaviour.join(&app).await.unwrap();
    until("the model", || !app.fleet.models().is_empty()).await;
    assert_eq!(state_of(&app, "w1"), "joining");
    let part = |last| Snapshot { epoch, sequence: 4, hashes: vec![1; 16], last };
    worker.send(Frame::Snapshot(part(false)));
    worker.send(Frame::Snapshot(part(true)));
    until("w1 is ready", || state_of(&app, "w1") == "ready").await;
    assert_eq!(of_worker(&app, "w1")["blocks_announced"], 4);
}

#[tokio::test]
async fn a_snapshot_that_is_not_complete_in_time_ends_the_link() {
    let app = start_router(|args| args.describe_timeout_ms = 50).await;
    let behaviour = Behaviour { snapshots: false, ..Behaviour::new("w1") };
    behaviour.join(&app).await.unwrap().closed().await;
    until("the reason", || metric(&app, "headrace_link_errors_total", "snapshot") > 0.0).await;
}

#[tokio::test]
async fn the_secret_decides_who_joins() {
    let app = start_router(|args| args.secret = Some("open sesame".into())).await;
    let right = Behaviour { secret: Some("open sesame".into()), ..Behaviour::new("right") };
    let nonce = right.hello.nonce.clone();
    let right = right.ready(&app).await;
    let proof = AuthKey::derive(b"open sesame").proof(Side::Router, &nonce);
    assert_eq!(right.welcome.proof, proof, "the router proves itself too");
    assert!(right.welcome.hash_key.is_empty(), "both sides derive it");
    for secret in [None, Some("open barley".to_owned())] {
        let behaviour = Behaviour { secret, ..Behaviour::new("wrong") };
        let refuse = behaviour.join(&app).await.expect_err("it may not join");
        assert_eq!(refuse.reason, RefuseReason::Secret);
    }
    // who does not know the secret does not get to know the fleet
    let mut other = Behaviour { secret: Some("guess".into()), ..Behaviour::new("other") };
    other.hello.fingerprints.weights = "other".into();
    assert_eq!(other.join(&app).await.unwrap_err().reason, RefuseReason::Secret);
    assert_eq!(state_of(&app, "wrong"), "");
    assert_eq!(state_of(&app, "right"), "ready");
}

#[tokio::test]
async fn without_a_secret_the_router_gives_the_hash_key() {
    let app = start_router(|_| {}).await;
    let (one, two) =
        (Behaviour::new("w1").ready(&app).await, Behaviour::new("w2").ready(&app).await);
    assert_eq!(one.welcome.hash_key.len(), 32);
    assert_eq!(one.welcome.hash_key, two.welcome.hash_key);
    assert!(one.welcome.challenge.is_empty() && one.welcome.proof.is_empty());
    assert_eq!(one.welcome.heartbeat_ms, 1000);
}

#[tokio::test]
async fn a_worker_that_was_started_anew_joins_once_its_former_life_ended_and_an_older_one_is_refused()
 {
    let app = start_router(|_| {}).await;
    let older = Behaviour::new("w1");
    let newer = Behaviour::new("w1");
    let first = older.clone().ready(&app).await;
    let epoch = newer.hello.epoch;
    drop(first); // it was killed: its socket is closed with it
    let _second = newer.join_when_free(&app).await;
    until("it is ready", || state_of(&app, "w1") == "ready").await;
    assert_eq!(of_worker(&app, "w1")["epoch"], epoch);
    let refuse = older.join(&app).await.expect_err("it is older");
    assert_eq!((refuse.reason, refuse.field.as_str()), (RefuseReason::Superseded, "epoch"));
    assert_eq!(app.fleet.workers()["workers"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn what_is_no_handshake_ends_with_a_reason() {
    let app = start_router(|_| {}).await;
    tokio::time::pause();
    let address = app.fleet.address();
    let long_hello = Hello { model: "x".repeat(100_000), ..hello("w1") };
    let mut body = Vec::new();
    headrace_router::fleet::codec::encode(&Frame::Hello(long_hello), &mut body).unwrap();
    let long_hello = [&u32::try_from(body.len()).unwrap().to_le_bytes()[..], &body].concat();
    for (bytes, reason) in [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), "handshake_frame"),
        (u32::MAX.to_le_bytes().to_vec(), "handshake_frame"),
        (vec![1, 0, 0, 0, 0xc1], "handshake_frame"),
        (long_hello, "handshake_frame"),
        (vec![9, 0], "handshake_late"),
        (vec![], "handshake_silent"),
    ] {
        let before = metric(&app, "headrace_link_errors_total", reason);
        let (mut reader, mut writer) = dial(address).await;
        let _ = writer.raw(&bytes).await;
        assert_eq!(receive(&mut reader).await, None, "{reason}");
        until(reason, || metric(&app, "headrace_link_errors_total", reason) > before).await;
    }
    let (mut reader, mut writer) = dial(address).await;
    send(&mut writer, Frame::Step(step(vec![]))).await;
    assert_eq!(receive(&mut reader).await, None);
    let reason = "handshake_unexpected";
    until(reason, || metric(&app, "headrace_link_errors_total", reason) > 0.0).await;
}

#[tokio::test]
async fn dials_that_say_nothing_keep_nobody_from_joining_and_end_soon() {
    // no time runs out before this test does: who joins among them does so while they are there
    let app = start_router(|args| {
        args.first_byte_timeout_ms = 3_600_000;
        args.handshake_timeout_ms = 3_600_000;
    })
    .await;
    let mut dials = Vec::new();
    for _ in 0..400 {
        dials.push(dial(app.fleet.address()).await);
    }
    let errors = |reason: &str| metric(&app, "headrace_link_errors_total", reason);
    until("the oldest go", || errors("handshake_turned_out") >= 100.0).await;
    let _worker = Behaviour::new("w1").ready(&app).await;
    // nor do those that say a little, as long as others say nothing, nor those that say it all and are no worker
    for (_, writer) in &mut dials {
        let _ = writer.raw(&[9]).await;
    }
    let _worker = Behaviour::new("w2").ready(&app).await;
    assert_eq!(state_of(&app, "w1"), "ready");
}

#[tokio::test]
async fn silent_dials_end_after_the_first_byte_is_due_and_slow_ones_with_the_handshake() {
    let app = start_router(|args| {
        args.secret = Some("open sesame".into());
        args.first_byte_timeout_ms = 50;
        args.handshake_timeout_ms = 400;
    })
    .await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(dial(app.fleet.address()).await);
    }
    let errors = |reason: &str| metric(&app, "headrace_link_errors_total", reason);
    until("they are gone", || errors("handshake_silent") == 100.0).await;
    for (reader, _) in &mut silent {
        assert_eq!(receive(reader).await, None);
    }
    // one that knows no secret gets a welcome and is not heard of any more
    let (mut reader, mut writer) = dial(app.fleet.address()).await;
    send(&mut writer, Frame::Hello(hello("w1"))).await;
    assert!(matches!(receive(&mut reader).await, Some(Frame::Welcome(_))));
    assert_eq!(receive(&mut reader).await, None);
    until("it was too slow", || errors("handshake_late") == 1.0).await;
    // one that hangs up at once
    drop(dial(app.fleet.address()).await);
    until("it hung up", || errors("handshake_closed") == 1.0).await;
}

#[tokio::test]
async fn silent_dials_through_a_unix_socket_keep_nobody_from_joining() {
    let dir = std::env::temp_dir().join(format!("headrace-dials-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let listen = format!("unix:{}", dir.join("workers.sock").display());
    let app = start_router(|args| {
        args.worker_listen = listen;
        args.first_byte_timeout_ms = 3_600_000;
    })
    .await;
    let mut dials = Vec::new();
    for _ in 0..300 {
        dials.push(dial(app.fleet.address()).await);
    }
    let _worker = Behaviour::new("w1").ready(&app).await;
    let turned_out = || metric(&app, "headrace_link_errors_total", "handshake_turned_out");
    until("the oldest went", || turned_out() >= 44.0).await;
    std::fs::remove_dir_all(&dir).unwrap();
}

#[tokio::test]
async fn a_unix_socket_works_and_its_file_goes_with_the_router() {
    let dir = std::env::temp_dir().join(format!("headrace-test-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("workers.sock");
    let listen = format!("unix:{}", path.display());
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap()); // left over by a killed router
    let app = start_router(|args| args.worker_listen = listen.clone()).await;
    let mut worker = Behaviour::new("w1").ready(&app).await;
    let args = headrace_router::config::RouterArgs {
        worker_listen: listen,
        port: 0,
        ..Default::default()
    };
    let second = headrace_router::app::App::start(args.try_into().unwrap()).await;
    assert!(second.unwrap_err().to_string().contains("cannot listen on unix:"), "it is in use");
    assert!(path.exists());
    drop(app);
    worker.closed().await;
    until("the file is gone", || !path.exists()).await;
    std::fs::remove_dir(&dir).unwrap();
}

#[tokio::test]
async fn a_wrong_certificate_is_named_at_the_start() {
    let mut args = headrace_router::config::RouterArgs {
        port: 0,
        worker_listen: "127.0.0.1:0".into(),
        worker_tls_cert: Some("/nonexistent/cert.pem".into()),
        worker_tls_key: Some("/nonexistent/key.pem".into()),
        ..Default::default()
    };
    let start = |args: headrace_router::config::RouterArgs| async {
        headrace_router::app::App::start(args.try_into().unwrap()).await.unwrap_err()
    };
    let error = start(args.clone()).await;
    assert!(error.to_string().contains("/nonexistent/cert.pem"), "{error}");
    let cause = error.source().unwrap().downcast_ref::<std::io::Error>().unwrap();
    assert_eq!(cause.kind(), std::io::ErrorKind::NotFound);
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    args.worker_tls_cert = Some(here.into());
    args.worker_tls_key = Some(here.into());
    let error = start(args).await;
    assert!(error.to_string().ends_with("Cargo.toml for TLS: it holds no private key"), "{error}");
    let cause = error.source().unwrap().source().unwrap();
    assert!(cause.is::<rustls::pki_types::pem::Error>(), "{cause}");
}

#[test]
fn a_router_without_threads_for_its_tokeniser_says_what_the_system_said() {
    let error = headrace_router::fleet::StartError::Threads(std::io::Error::other("no more tasks"));
    assert_eq!(error.source().unwrap().to_string(), "no more tasks");
}

#[tokio::test]
async fn plain_text_to_a_tls_router_is_turned_away() {
    let (cert, key) = tls_files();
    let app = start_router(|args| {
        args.worker_tls_cert = Some(cert);
        args.worker_tls_key = Some(key);
    })
    .await;
    let (mut reader, mut writer) = dial(app.fleet.address()).await;
    send(&mut writer, Frame::Hello(hello("w1"))).await;
    let answer = timeout(Duration::from_secs(10), reader.next()).await.unwrap();
    assert!(!matches!(answer, Ok(Some(_))));
    let reason = "handshake_tls";
    until(reason, || metric(&app, "headrace_link_errors_total", reason) > 0.0).await;
}

#[tokio::test]
async fn a_worker_joins_over_tls() {
    let (cert, key) = tls_files();
    let app = start_router(|args| {
        args.worker_tls_cert = Some(cert);
        args.worker_tls_key = Some(key);
    })
    .await;
    let (mut reader, mut writer) = dial_tls(app.fleet.address(), None).await;
    send(&mut writer, Frame::Hello(hello("w1"))).await;
    assert!(matches!(receive(&mut reader).await, Some(Frame::Welcome(_))));
    until("it joined", || state_of(&app, "w1") == "joining").await;
}

pub(super) fn tls_files() -> (std::path::PathBuf, std::path::PathBuf) {
    (data("localhost.crt"), data("localhost.key"))
}
