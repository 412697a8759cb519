//! `/workers/NAME/drain`: who may, what is a good order, and what it answers.

use super::client::{TestRouter, args};
use crate::fake_worker::{Behaviour, until};

#[tokio::test]
async fn a_drain_is_begun_and_followed() {
    let (router, worker) = TestRouter::with(Behaviour::new("my worker"), args()).await;
    let reply = router.get("/workers/my%20worker/drain").await;
    assert_eq!((reply.status, &reply.error()["code"]), (404, &"unknown_drain".into()));
    let path = "/workers/my%20worker/drain";
    let reply = router.post(path, r#"{"budget_ms": 5000, "hand_over": 10}"#).await;
    assert_eq!(reply.status, 202);
    assert_eq!(reply.json()["budget_ms"], 5000);
    let reply = router.post(path, "{}").await;
    assert_eq!((reply.status, &reply.error()["code"]), (409, &"already_draining".into()));
    assert_eq!(router.get(path).await.json()["worker"], "my worker");
    assert_eq!(router.get("/ready").await.status, 503);
    drop(worker);
    until("it is over", || {
        let state = router.app.fleet.drain_state("my worker").unwrap();
        state["phase"] == "done"
    })
    .await;
    let reply = router.post(path, "{}").await;
    assert_eq!((reply.status, &reply.error()["code"]), (404, &"unknown_worker".into()));
}

#[tokio::test]
async fn bad_orders_are_refused_by_field_and_change_nothing() {
    let (router, _worker) = TestRouter::with(Behaviour::new("w1"), args()).await;
    let cases = [
        (r#"{"budget_ms": -1}"#, "budget_ms"),
        (r#"{"budget_ms": 3600001}"#, "budget_ms"),
        (r#"{"budget_ms": "30s"}"#, "budget_ms"),
        (r#"{"budget_ms": 1.5}"#, "budget_ms"),
        (r#"{"hand_over": -1}"#, "hand_over"),
        (r#"{"hand_over": 65537}"#, "hand_over"),
        (r#"{"hand_over": true}"#, "hand_over"),
        (r#"{"keep": 1}"#, "keep"),
    ];
    for (body, field) in cases {
        let reply = router.post("/workers/w1/drain", body).await;
        assert_eq!((reply.status, &reply.error()["param"]), (400, &field.into()), "{body}");
    }
    for body in ["", "[]", "{", "null"] {
        assert_eq!(router.post("/workers/w1/drain", body).await.status, 400, "{body:?}");
    }
    assert_eq!(router.post("/workers/nobody/drain", "{}").await.status, 404);
    assert_eq!(router.send("DELETE /workers/w1/drain HTTP/1.1", b"").await.status, 405);
    assert_eq!(router.get("/workers").await.json()["workers"][0]["state"], "ready");
}
