//! Being found: what a router asks of etcd, and what it does when that is gone, forgetful, locked or not an etcd at all.

use std::sync::Arc;

use headrace_router::app::App;
use headrace_router::config::{EtcdVariables, Secret};
use headrace_router::fleet::etcd::messages::{KeepAlive, LeaseGrant, LeaseRevoke, Login, Put};
use serde_json::Value;
use tokio::net::TcpListener;

use super::fake_etcd::{FakeEtcd, Says, data, good};
use crate::fake_worker::*;

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const PUT: &str = "/etcdserverpb.KV/Put";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const LOGIN: &str = "/etcdserverpb.Auth/Authenticate";

async fn registered(endpoints: &str) -> Arc<App> {
    entering(endpoints, EtcdVariables::default()).await
}

async fn entering(endpoints: &str, etcd: EtcdVariables) -> Arc<App> {
    let register = format!("etcd:{endpoints}/head/race");
    start_router(move |args| {
        args.register = Some(register);
        args.register_ttl_s = 2;
        args.etcd = etcd;
    })
    .await
}

fn errors(app: &App, reason: &str) -> f64 {
    metric(app, "headrace_discovery_errors_total", reason)
}

async fn until_registered(app: &App) {
    until("the metric", || metric(app, "headrace_discovery_registered", "") == 1.0).await;
}

/// Accepts and says nothing.
async fn silent() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = listener.local_addr().unwrap().to_string();
    (listener, endpoint)
}

#[tokio::test]
async fn a_router_registers_stays_and_withdraws() {
    let mut etcd = FakeEtcd::start(good(usize::MAX)).await;
    let app = registered(&etcd.endpoint).await;
    assert_eq!(etcd.next::<LeaseGrant>(GRANT).await.ttl_s, 2);
    let put: Put = etcd.next(PUT).await;
    let value: Value = serde_json::from_slice(&put.value).unwrap();
    assert_eq!(value["address"], app.fleet.address().to_string(), "with the port that was taken");
    let key = format!("head/race/{}", value["router"].as_str().unwrap());
    assert_eq!((put.key, put.lease), (key.into_bytes(), 77));
    until_registered(&app).await;
    assert_eq!(etcd.next::<KeepAlive>(KEEP_ALIVE).await.id, 77);
    app.fleet.shut_down();
    loop {
        let asked = etcd.any().await;
        assert_eq!(asked.token, None);
        if asked.path == REVOKE {
            assert_eq!(asked.message::<LeaseRevoke>().id, 77);
            break;
        }
    }
    assert_eq!(metric(&app, "headrace_discovery_registered", ""), 0.0);
}

#[tokio::test]
async fn a_lost_lease_is_replaced() {
    let mut etcd = FakeEtcd::start(good(0)).await;
    let app = registered(&etcd.endpoint).await;
    for round in 0..2 {
        etcd.next::<LeaseGrant>(GRANT).await;
        assert_eq!(etcd.next::<Put>(PUT).await.lease, 77 + round);
        etcd.next::<KeepAlive>(KEEP_ALIVE).await;
    }
    until("the metric", || errors(&app, "lease_lost") >= 1.0).await;
}

#[tokio::test]
async fn a_lease_that_ends_before_its_key_is_set_is_replaced() {
    let mut well = good(usize::MAX);
    let mut etcd = FakeEtcd::start(move |path, before| match (path, before) {
        (PUT, 0) => Says::Status(5, "etcdserver: requested lease not found"),
        _ => well(path, before),
    })
    .await;
    let app = registered(&etcd.endpoint).await;
    for lease in [77, 78] {
        etcd.next::<LeaseGrant>(GRANT).await;
        assert_eq!(etcd.next::<Put>(PUT).await.lease, lease);
    }
    assert_eq!(errors(&app, "lease_lost"), 1.0);
}

#[tokio::test]
async fn another_endpoint_does_where_one_is_gone() {
    let (listener, gone) = silent().await;
    drop(listener);
    let mut etcd = FakeEtcd::start(good(usize::MAX)).await;
    let app = registered(&format!("{gone},{}", etcd.endpoint)).await;
    etcd.next::<LeaseGrant>(GRANT).await;
    etcd.next::<Put>(PUT).await;
    until_registered(&app).await;
    assert_eq!(errors(&app, ""), 0.0, "it was reached");
}

#[tokio::test]
async fn another_endpoint_does_where_one_is_silent_or_without_a_leader() {
    let (_listener, silent) = silent().await;
    let behind = FakeEtcd::start(|_, _| Says::Status(14, "etcdserver: no leader")).await;
    let mut etcd = FakeEtcd::start(good(usize::MAX)).await;
    let app = registered(&format!("{silent},{},{}", behind.endpoint, etcd.endpoint)).await;
    etcd.next::<LeaseGrant>(GRANT).await;
    etcd.next::<Put>(PUT).await;
    until_registered(&app).await;
    assert_eq!(errors(&app, ""), 0.0, "it was reached");
}

#[tokio::test]
async fn what_is_no_etcd_or_lets_nobody_in_is_asked_again_and_named() {
    let answers = [
        (Says::Message(Vec::new()), "etcd_answer"), // a lease without a number
        (Says::Message(vec![0xff; 20]), "etcd_answer"),
        (Says::Http(200, ""), "etcd_answer"),
        (Says::Http(200, "<html>"), "etcd_answer"),
        (Says::Http(404, "no such page"), "etcd_answer"),
        (Says::Http(503, "no leader"), "etcd_answer"), // of a proxy: etcd has words of its own
        (Says::Status(14, "etcdserver: no leader"), "etcd_unreachable"),
        (Says::Status(8, "etcdserver: mvcc: database space exceeded"), "etcd_answer"),
        (Says::Status(7, "etcdserver: permission denied"), "etcd_denied"),
        (Says::Status(3, "etcdserver: user name is empty"), "etcd_denied"),
        (Says::Status(16, "etcdserver: invalid auth token"), "etcd_denied"),
    ];
    for (says, reason) in answers {
        let mut well = good(usize::MAX);
        let mut etcd = FakeEtcd::start(move |path, before| match (path, before) {
            (GRANT, 0) => says.clone(),
            _ => well(path, before),
        })
        .await;
        let app = registered(&etcd.endpoint).await;
        etcd.next::<LeaseGrant>(GRANT).await;
        etcd.next::<LeaseGrant>(GRANT).await;
        etcd.next::<Put>(PUT).await;
        assert_eq!((errors(&app, reason), errors(&app, "")), (1.0, 1.0), "{reason}");
        app.fleet.shut_down();
    }
}

#[tokio::test]
async fn a_login_is_shown_with_each_call_and_made_again_when_it_is_forgotten() {
    let mut well = good(usize::MAX);
    let mut etcd = FakeEtcd::start(move |path, before| match (path, before) {
        (KEEP_ALIVE, 0) => Says::Status(16, "etcdserver: invalid auth token"),
        _ => well(path, before),
    })
    .await;
    let login = EtcdVariables {
        user: Some("headrace".into()),
        password: Some(Secret("open sesame".into())),
        ..EtcdVariables::default()
    };
    let app = entering(&etcd.endpoint, login).await;
    let mut seen = Vec::new();
    for path in [LOGIN, GRANT, PUT, KEEP_ALIVE, LOGIN, KEEP_ALIVE] {
        let asked = etcd.any().await;
        assert_eq!(asked.path, path);
        if path == LOGIN {
            let Login { name, password } = asked.message();
            assert_eq!((name.as_str(), password.as_str()), ("headrace", "open sesame"));
        }
        seen.push(asked.token.unwrap_or_default());
    }
    assert_eq!(seen, ["", "token-0", "token-0", "token-0", "", "token-1"]);
    assert_eq!(errors(&app, ""), 0.0, "a login that ended is no failure");
}

#[tokio::test]
async fn a_wrong_password_is_denied_and_an_etcd_without_logins_asks_for_none() {
    let login = || EtcdVariables {
        user: Some("headrace".into()),
        password: Some(Secret("open sesame".into())),
        ..EtcdVariables::default()
    };
    let wrong = "etcdserver: authentication failed, invalid user ID or password";
    let mut etcd = FakeEtcd::start(move |_, _| Says::Status(3, wrong)).await;
    let app = entering(&etcd.endpoint, login()).await;
    etcd.next::<Login>(LOGIN).await;
    etcd.next::<Login>(LOGIN).await;
    assert!(errors(&app, "etcd_denied") >= 1.0);
    assert_eq!(errors(&app, "etcd_denied"), errors(&app, ""));

    let mut well = good(usize::MAX);
    let mut etcd = FakeEtcd::start(move |path, before| match path {
        LOGIN => Says::Status(9, "etcdserver: authentication is not enabled"),
        _ => well(path, before),
    })
    .await;
    let app = entering(&etcd.endpoint, login()).await;
    etcd.next::<Login>(LOGIN).await;
    let asked = etcd.any().await;
    assert_eq!((asked.path.as_str(), asked.token), (GRANT, None));
    until_registered(&app).await;
}

#[tokio::test]
async fn an_etcd_without_tls_gets_nothing_where_tls_is_wanted() {
    let etcd = FakeEtcd::start(good(usize::MAX)).await;
    let tls = EtcdVariables { ca: data("localhost.crt"), ..EtcdVariables::default() };
    let app = entering(&etcd.endpoint, tls).await;
    until("the metric", || errors(&app, "etcd_tls") >= 1.0).await;
    assert_eq!(metric(&app, "headrace_discovery_registered", ""), 0.0);
}

#[tokio::test]
async fn without_etcd_a_router_serves_all_the_same() {
    let (listener, gone) = silent().await;
    drop(listener);
    let app = registered(&gone).await;
    let _worker = Behaviour::new("w1").ready(&app).await;
    until("the metric", || errors(&app, "etcd_unreachable") >= 1.0).await;
    assert!(app.fleet.ready());
}
