//! What a key has used, what is shown of it, and what files that change do to it.

use std::collections::HashMap;
use std::time::Duration;

use prometheus_client::registry::Registry;
use tokio::time::advance;

use super::*;
use crate::config::{Config, RouterArgs};
use crate::error::RouteError;
use crate::metrics::Exposition;

fn args(lines: &[&str]) -> RouterArgs {
    let api_key = lines.iter().map(|&line| line.to_owned()).collect();
    RouterArgs { api_key, admin_key: Vec::new(), secret: None, ..RouterArgs::default() }
}

fn ring(lines: &[&str]) -> Arc<KeyRing> {
    KeyRing::new(&Config::try_from(args(lines)).unwrap().http.access)
}

fn client(ring: &KeyRing, key: &str) -> Arc<ClientKey> {
    let standing = ring.now().of_sender(key.as_bytes());
    let Standing::Client(key) = standing else { panic!("{key} is {standing:?}") };
    key
}

fn wait(refused: Result<(), RouteError>) -> (&'static str, u64) {
    let refused = refused.unwrap_err();
    let RouteError::KeyLimit { what, retry_after, .. } = refused else { panic!("{refused}") };
    (what, retry_after.as_millis() as u64)
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_counts_for_nothing_and_a_debt_is_paid_first() {
    let ring = ring(&["k rpm=2 tpm=60"]);
    let key = client(&ring, "k");
    key.admit().unwrap();
    let running = key.begin(1).unwrap();
    running.take_prompt(30).unwrap();
    running.served();
    running.charge_answer(50); // 20 more than there were
    assert_eq!(wait(key.admit()), ("tokens a minute", 21_000));
    assert_eq!(wait(running.take_prompt(1)), ("tokens a minute", 21_000));
    assert_eq!(key.standing().requests.map(|left| left.remaining), Some(1), "they took no request");
    assert_eq!(key.standing().tokens.map(|left| (left.limit, left.remaining)), Some((60, 0)));
    advance(Duration::from_millis(20_999)).await;
    assert!(key.admit().is_err());
    advance(Duration::from_millis(1)).await;
    key.admit().unwrap();
    running.take_prompt(1).unwrap();
    assert_eq!(wait(key.admit()).0, "tokens a minute");
    drop(running); // no worker got the second prompt
    key.begin(1).unwrap().take_prompt(1).unwrap();
    assert_eq!(key.standing().tokens.map(|left| left.remaining), Some(1));
    advance(Duration::from_millis(120_000)).await;
    for _ in 0..2 {
        key.admit().unwrap();
    }
    assert_eq!(wait(key.admit()), ("requests a minute", 30_000));
    // a prompt of more than a minute's worth goes when nothing else does
    advance(Duration::from_secs(60)).await;
    let running = key.begin(1).unwrap();
    running.take_prompt(600).unwrap();
    assert_eq!(wait(running.take_prompt(600)), ("tokens a minute", 600_000));
}

#[tokio::test(start_paused = true)]
async fn answers_at_a_time_are_given_back() {
    let ring = ring(&["k streams=3", "free"]);
    let key = client(&ring, "k");
    let two = key.begin(2).unwrap();
    assert!(key.begin(2).is_err() && key.begin(usize::MAX).is_err());
    let one = key.begin(1).unwrap();
    assert!(key.begin(1).is_err());
    drop(two);
    assert!(key.begin(2).is_ok());
    drop(one);
    assert_eq!(key.streams(), 0);
    let _three = key.begin(3).unwrap();
    assert!(key.begin(0).is_ok(), "what takes no place needs none");
    assert!(client(&ring, "free").begin(1 << 20).is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_a_key_has_used_goes_with_it_and_not_with_its_line() {
    let before = KeysNow::of(
        Config::try_from(args(&["k rpm=2", "gone"])).unwrap().http.access.keys,
        &HashMap::new(),
    );
    let Standing::Client(key) = before.of_sender(b"k") else { panic!() };
    key.admit().unwrap();
    let known = before.clients.iter().zip(&before.by_client);
    let known = known.map(|(key, client)| (key.id(), Arc::clone(client))).collect();
    let set = Config::try_from(args(&["new", "alice k rpm=1 streams=1"])).unwrap().http.access.keys;
    let after = KeysNow::of(set, &known);
    let Standing::Client(now) = after.of_sender(b"k") else { panic!() };
    assert_ne!(now.tenant(), key.tenant());
    assert_eq!(now.standing().requests.map(|left| (left.limit, left.remaining)), Some((1, 1)));
    now.admit().unwrap();
    assert!(now.admit().is_err() && key.admit().is_err(), "it is one key");
    let running = key.begin(1).unwrap();
    assert!(now.begin(1).is_err(), "answers that began under the old line count");
    drop(running);
    assert!(now.begin(1).is_ok());
    assert!(matches!(after.of_sender(b"gone"), Standing::Unknown));
}

#[tokio::test]
async fn labels_are_names_of_the_file_and_few() {
    let lines: Vec<String> = (0..400).map(|n| format!("secret{n} name=n{n}")).collect();
    let lines: Vec<&str> =
        lines.iter().map(String::as_str).chain(["secret", "alice secret-of-alice"]).collect();
    let ring = ring(&lines);
    client(&ring, "secret").admit().unwrap();
    client(&ring, "secret0").admit().unwrap();
    client(&ring, "secret399").admit().unwrap();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(KeysShown(Arc::clone(&ring))));
    let text = Exposition::Text.render(&registry);
    assert!(!text.contains("secret") && !text.contains("alice"), "{text}");
    assert!(text.contains("headrace_key_requests_total{key=\"n0\"} 1"), "{text}");
    assert!(text.contains("headrace_key_requests_total{key=\"(others)\"} 2"), "{text}");
    let samples = text.lines().filter(|line| line.starts_with("headrace_key_requests_total{"));
    assert_eq!(samples.count(), 257);
}

#[test]
fn operators_scrapers_and_clients_are_told_apart_and_expire() {
    let mut args = args(&["c", "old expires=2020-01-01"]);
    args.admin_key = [
        "op",
        "scrape only=metrics",
        "gone expires=2020-01-01",
        "gone2 only=metrics expires=2020-01-01",
    ]
    .map(str::to_owned)
    .to_vec();
    let ring = KeyRing::new(&Config::try_from(args).unwrap().http.access);
    let of = |key: &str| ring.now().of_sender(key.as_bytes());
    assert!(matches!(of("c"), Standing::Client(_)));
    assert!(matches!(of("op"), Standing::Operator));
    assert!(matches!(of("scrape"), Standing::Scraper));
    for old in ["old", "gone", "gone2"] {
        assert!(matches!(of(old), Standing::Expired), "{old}");
    }
    for unknown in ["", "x", "op2"] {
        assert!(matches!(of(unknown), Standing::Unknown), "{unknown}");
    }
    assert!(!ring.may_change(), "there is no file");
    assert_eq!(format!("{:?} {:?}", ring, of("c")).matches("c)").count(), 0);
}

#[test]
fn a_file_that_has_not_changed_is_neither_read_nor_refused_again_unless_somebody_insists() {
    let file = std::env::temp_dir().join(format!("headrace-key-ring-{}", std::process::id()));
    std::fs::write(&file, "k\n").unwrap();
    let args = RouterArgs { api_key_file: Some(file.clone()), ..args(&["of-variable"]) };
    let access = Config::try_from(args).unwrap().http.access;
    let ring = KeyRing::new(&access);
    let known = |key: &str| matches!(ring.now().of_sender(key.as_bytes()), Standing::Client(_));
    assert!(ring.may_change());
    assert_eq!((ring.reload(false), ring.reload(true)), (Reloaded::Same, Reloaded::New));
    std::fs::write(&file, "k\nof-variable rpm=1\n").unwrap(); // which has no limits in the variable
    assert!(
        matches!(ring.reload(false), Reloaded::Refused(why) if why.contains("settings differ"))
    );
    assert_eq!(ring.reload(false), Reloaded::Same);
    assert!(matches!(ring.reload(true), Reloaded::Refused(_)));
    assert!(known("k") && known("of-variable"));
    std::fs::write(&file, "other\n").unwrap();
    assert_eq!((ring.reload(false), ring.reload(false)), (Reloaded::New, Reloaded::Same));
    assert!(known("other") && known("of-variable") && !known("k"));
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(ring.reload(false), Reloaded::Refused(why) if why.contains("cannot read")));
    std::fs::create_dir(&file).unwrap();
    assert!(!access.key_sources.may_change(), "what is no plain file is read once");
    std::fs::remove_dir(&file).unwrap();
}

#[test]
fn keys_come_from_where_a_change_of_the_configuration_names_them() {
    let file = std::env::temp_dir().join(format!("headrace-key-change-{}", std::process::id()));
    std::fs::write(&file, "new\nboth rpm=5\n").unwrap();
    let access = |args| Config::try_from(args).unwrap().http.access;
    let ring = KeyRing::new(&access(args(&["old", "both rpm=5"])));
    client(&ring, "both").admit().unwrap();
    ring.replace(&access(RouterArgs { api_key_file: Some(file.clone()), ..args(&[]) }));
    assert!(matches!(ring.now().of_sender(b"old"), Standing::Unknown));
    client(&ring, "new").admit().unwrap();
    let used = client(&ring, "both").used().requests.load(Relaxed);
    assert_eq!(used, 1, "what a key has used stays with it");
    assert!(ring.may_change(), "the file is looked at from now on");
    assert_eq!(ring.reload(false), Reloaded::Same);
    std::fs::remove_file(&file).unwrap();
}
