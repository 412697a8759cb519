//! The dashboard: who sees the page and its stream, what an event holds, and that viewers are bounded and cost nobody else.

use headrace_router::config::{RouterArgs, WorkerListen};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::fake_worker::{Behaviour, MODEL, in_time, until};
use crate::http::client::{Connection, Reply, TestRouter, args};

const EVENTS: &str = "GET /dashboard/events HTTP/1.1";
/// As many may watch at once.
const MOST_VIEWERS: usize = 16;

fn with_keys() -> RouterArgs {
    RouterArgs { api_key: vec!["client-key".into()], admin_key: vec!["admin-key".into()], ..args() }
}

fn bearing(head: &str, key: &str) -> String {
    format!("{head}\r\nAuthorization: Bearer {key}")
}

/// Opens the stream; its head.
async fn open<S: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut Connection<S>,
    head: &str,
) -> Reply {
    connection.request(head, b"").await;
    connection.head().await
}

/// The next event, once all of it is there.
async fn event<S: AsyncRead + AsyncWrite + Unpin>(connection: &mut Connection<S>) -> Option<Value> {
    let mut text = Vec::new();
    while !text.ends_with(b"\n\n") {
        text.extend(connection.chunk().await?);
    }
    let data = text.strip_prefix(b"data: ").expect("events are data alone");
    Some(serde_json::from_slice(data).unwrap())
}

/// Who watches, by what a router with a bound on that says to one more.
async fn is_full(router: &TestRouter) -> bool {
    let mut connection = router.connect().await;
    open(&mut connection, EVENTS).await.status == 429
}

#[tokio::test]
async fn the_page_may_load_nothing_from_elsewhere_and_holds_nothing_of_the_fleet() {
    let (router, _worker) = TestRouter::with(Behaviour::new("a-secret-name"), args()).await;
    let page = router.get("/").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap();
    for part in
        ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"]
    {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert!(!page.text().contains("a-secret-name") && !page.text().contains(MODEL));
    for part in page.text().split("=\"dashboard/").skip(1) {
        let file = part.split('"').next().unwrap();
        let reply = router.get(&format!("/dashboard/{file}")).await;
        assert_eq!(
            (reply.status, reply.header("x-content-type-options")),
            (200, Some("nosniff")),
            "{file}"
        );
    }
    assert_eq!(router.get("/dashboard/nothing.js").await.status, 404);
}

#[tokio::test]
async fn an_event_shows_rates_queue_workers_and_decisions_beside_what_happened() {
    let (router, _worker) = TestRouter::saying("Hello").await;
    let mut connection = router.connect().await;
    let head = open(&mut connection, EVENTS).await;
    assert_eq!(
        (head.status, head.header("content-type")),
        (200, Some("text/event-stream; charset=utf-8"))
    );
    assert_eq!(head.header("cache-control"), Some("no-store"));
    let first = event(&mut connection).await.unwrap();
    assert_eq!(first["output_tokens_per_s"], Value::Null, "there is nothing to compare with");
    assert_eq!((&first["workers_ready"], &first["workers_total"]), (&json!(1), &json!(1)));
    assert_eq!(first["queue"]["classes"], json!({"low": 0, "normal": 0, "high": 0}));

    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).to_string();
    let answer = router.post("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200);
    let id = answer.header("x-request-id").unwrap();
    let mut seen = event(&mut connection).await.unwrap();
    let finished =
        |seen: &Value| seen["finished"] == 1 && !seen["decisions"].as_array().unwrap().is_empty();
    while !finished(&seen) {
        seen = event(&mut connection).await.unwrap();
    }
    assert_eq!(
        (&seen["models"], &seen["failed"], &seen["draining"]),
        (&json!([MODEL]), &json!(0), &json!(false))
    );
    let decision = &seen["decisions"][0];
    assert_eq!((&decision["request"], &decision["worker"]), (&json!(id), &json!("w")));
    assert!(decision["predicted"]["first_token_ms"].is_number(), "{decision}");
    assert_eq!(decision["actual"]["outcome"], "finished");
    assert!(decision["actual"]["first_token_ms"].is_number());
    assert_eq!(seen["ttft_ms"]["count"], 1);
    let tile = &seen["workers"][0];
    assert_eq!(
        (&tile["id"], &tile["role"], &tile["state"]),
        (&json!("w"), &json!("both"), &json!("ready"))
    );
    for name in [
        "blocks",
        "blocks_used",
        "running",
        "waiting",
        "step_ms",
        "accepted",
        "credit_withdrawn",
        "group",
    ] {
        assert!(tile.get(name).is_some(), "{name} in {tile}");
    }
    // a click on it asks for this
    assert_eq!(router.get(&format!("/decisions/{id}")).await.status, 200);
}

#[tokio::test]
async fn one_event_is_given_where_one_is_asked_for() {
    let router = TestRouter::start(args()).await;
    let mut connection = router.connect().await;
    let head = open(&mut connection, "GET /dashboard/events?once=true HTTP/1.1").await;
    assert_eq!(head.status, 200);
    assert!(event(&mut connection).await.is_some());
    assert_eq!(event(&mut connection).await, None);
    assert_eq!(router.get("/dashboard/events?twice").await.status, 400);
}

#[tokio::test]
async fn with_keys_the_stream_is_for_operators_and_the_page_asks_for_their_key() {
    let router = TestRouter::start(with_keys()).await;
    for (head, status) in [
        (EVENTS.to_owned(), 401),
        (bearing(EVENTS, "unknown"), 401),
        (bearing(EVENTS, "client-key"), 403),
        (bearing(EVENTS, "admin-key"), 200),
    ] {
        let mut connection = router.connect().await;
        assert_eq!(open(&mut connection, &head).await.status, status, "{head}");
    }
    assert_eq!(router.get("/").await.status, 200, "somebody may type the key there");
}

#[tokio::test]
async fn where_only_clients_have_keys_nobody_at_their_port_is_told_of_a_dashboard() {
    let admin_listen = vec!["127.0.0.1:0".into()];
    let args = RouterArgs { api_key: vec!["client-key".into()], admin_listen, ..args() };
    let router = TestRouter::start(args).await;
    for head in ["GET / HTTP/1.1".to_owned(), bearing("GET / HTTP/1.1", "client-key")] {
        let reply = router.send(&head, b"").await;
        assert_eq!((reply.status, &reply.error()["code"]), (404, &json!("unknown_url")));
        assert_eq!(reply.error()["message"], "there is no / here");
    }
    let mut connection = router.connect().await;
    assert_eq!(open(&mut connection, &bearing(EVENTS, "client-key")).await.status, 403);
    // at the operators' own address both are there
    let WorkerListen::Tcp(address) = &router.operators[0] else { panic!("a port") };
    let mut page = Connection::of(TcpStream::connect(address).await.unwrap());
    assert_eq!(open(&mut page, "GET / HTTP/1.1").await.status, 200);
    let mut stream = Connection::of(TcpStream::connect(address).await.unwrap());
    assert_eq!(open(&mut stream, EVENTS).await.status, 200);
    assert!(event(&mut stream).await.is_some());
}

#[tokio::test]
async fn a_page_of_another_origin_takes_nobodys_place() {
    let router = TestRouter::start(args()).await;
    for (headers, status) in [
        ("Origin: https://evil.com", 403),
        ("Sec-Fetch-Site: cross-site", 403),
        ("Sec-Fetch-Site: same-site", 403),
        ("Origin: null", 403),
        ("Sec-Fetch-Site: same-origin", 200),
        ("Sec-Fetch-Site: same-origin\r\nOrigin: http://localhost", 200),
        // somebody else's, by a proxy of this machine
        ("X-Forwarded-For: 1.2.3.4", 403),
    ] {
        let mut connection = router.connect().await;
        let head = open(&mut connection, &format!("{EVENTS}\r\n{headers}")).await;
        assert_eq!(head.status, status, "{headers}");
    }
}

#[tokio::test]
async fn viewers_are_bounded_and_who_hangs_up_makes_room() {
    let router = TestRouter::start(args()).await;
    let mut viewers = Vec::new();
    for _ in 0..MOST_VIEWERS {
        let mut connection = router.connect().await;
        assert_eq!(open(&mut connection, EVENTS).await.status, 200);
        viewers.push(connection);
    }
    let refused = router.send(EVENTS, b"").await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("5")));
    assert_eq!(refused.error()["code"], "overloaded");
    drop(viewers.pop());
    let room = async {
        loop {
            let mut connection = router.connect().await;
            if open(&mut connection, EVENTS).await.status == 200 {
                return connection;
            }
        }
    };
    let mut late = in_time("the place of who left", room).await;
    assert!(event(&mut late).await.is_some(), "the latest document, at once");
    assert!(is_full(&router).await);
    // the others saw nothing of it, and all get the same document
    let seen: Vec<Value> =
        vec![event(&mut viewers[0]).await.unwrap(), event(&mut viewers[1]).await.unwrap()];
    assert!(seen.iter().all(|seen| seen["workers_total"] == 0));
}

#[tokio::test]
async fn a_viewer_that_does_not_read_holds_up_nobody() {
    let (router, _worker) = TestRouter::saying("Hello").await;
    let mut asleep = router.connect().await;
    asleep.request(EVENTS, b"").await;
    let mut awake = router.connect().await;
    assert_eq!(open(&mut awake, EVENTS).await.status, 200);
    for _ in 0..3 {
        assert!(event(&mut awake).await.is_some());
    }
    let body = json!({"model": MODEL, "prompt": "x"}).to_string();
    assert_eq!(router.post("/v1/completions", &body).await.status, 200);
    drop(asleep);
}

#[tokio::test]
async fn a_drain_ends_the_streams_of_clients_ports_and_shows_itself_to_operators() {
    let socket =
        std::env::temp_dir().join(format!("headrace-dashboard-{}.sock", std::process::id()));
    let admin_listen = vec![format!("unix:{}", socket.display())];
    // a client holds the drain up, so that there is something to see
    let (router, mut worker) =
        TestRouter::with(Behaviour::new("w"), RouterArgs { admin_listen, ..args() }).await;
    let mut client = router.connect().await;
    let body = json!({"model": MODEL, "prompt": "x", "stream": true}).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    client.request(head, body.as_bytes()).await;
    let submit = worker.submitted().await;

    let mut near = router.connect().await;
    assert_eq!(open(&mut near, EVENTS).await.status, 200);
    assert!(event(&mut near).await.is_some());
    let mut operator = Connection::of(UnixStream::connect(&socket).await.unwrap());
    assert_eq!(open(&mut operator, EVENTS).await.status, 200);
    router.drain();
    let ends = async { while event(&mut near).await.is_some() {} };
    in_time("the end of the stream", ends).await;
    let draining = async {
        loop {
            if event(&mut operator).await.expect("it goes on")["draining"] == true {
                return;
            }
        }
    };
    in_time("a document that says so", draining).await;
    drop((submit, client));
}

#[tokio::test]
async fn each_request_that_ends_is_counted_once_however_it_ends() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let counts = async || {
        let mut connection = router.connect().await;
        assert_eq!(open(&mut connection, "GET /dashboard/events?once HTTP/1.1").await.status, 200);
        let seen = event(&mut connection).await.unwrap();
        (seen["finished"].as_u64().unwrap(), seen["failed"].as_u64().unwrap())
    };
    router.get("/health").await;
    router.get("/v1/models").await;
    assert_eq!(counts().await, (0, 0), "probes and lists are no requests of this kind");
    // refused by a parser, refused before one, of no model
    router.post("/v1/completions", "{").await;
    router.get("/nothing/here").await;
    router.post("/v1/completions", json!({"model": "none", "prompt": "x"}).to_string()).await;
    // a document may be a second old
    let counted = async |wanted| while counts().await != wanted {};
    in_time("the refused are counted", counted((0, 3))).await;
    // left by its client
    let mut client = router.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    client.request(head, json!({"model": MODEL, "prompt": "x"}).to_string().as_bytes()).await;
    worker.submitted().await;
    drop(client);
    until("the cancelled request is over", || router.app.metrics.requests.streams.get() == 0).await;
    in_time("who left is counted", counted((0, 4))).await;
}
