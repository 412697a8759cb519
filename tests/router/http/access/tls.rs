//! Clients over TLS: what both agree on, who is refused and how they hear of it, certificates that change, and handshakes
//! that do not end.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use headrace_router::config::{RouterArgs, WorkerListen};
use headrace_router::core::frame::Finish;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::super::client::{Connection, TestRouter, args};
use crate::fake_worker::*;

/// Certificate and key of a server in a folder of their own, to be replaced.
struct Pair(PathBuf);

impl Pair {
    fn new(name: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("headrace-tls-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pair = Self(folder);
        pair.take("localhost.crt", "localhost.key");
        pair
    }

    fn take(&self, cert: &str, key: &str) {
        std::fs::copy(data(cert), self.cert()).unwrap();
        std::fs::copy(data(key), self.key()).unwrap();
    }

    fn cert(&self) -> PathBuf {
        self.0.join("tls.crt")
    }

    fn key(&self) -> PathBuf {
        self.0.join("tls.key")
    }

    fn args(&self) -> RouterArgs {
        RouterArgs { tls_cert: Some(self.cert()), tls_key: Some(self.key()), ..args() }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn encrypted() -> RouterArgs {
    let (tls_cert, tls_key) = (Some(data("localhost.crt")), Some(data("localhost.key")));
    RouterArgs { tls_cert, tls_key, ..args() }
}

async fn dial_with(
    router: &TestRouter,
    config: ClientConfig,
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(router.address).await.unwrap();
    let name = "localhost".try_into().unwrap();
    in_time("TLS", TlsConnector::from(Arc::new(config)).connect(name, stream)).await
}

async fn connect(router: &TestRouter, identity: Option<&str>) -> Connection<TlsStream<TcpStream>> {
    Connection::of(dial_with(router, tls_client(identity)).await.unwrap())
}

fn handshakes(router: &TestRouter, outcome: &str) -> f64 {
    metric(&router.app, "headrace_tls_handshakes_total", &format!("outcome=\"{outcome}\""))
}

fn shown(connection: &Connection<TlsStream<TcpStream>>) -> CertificateDer<'static> {
    connection.stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned()
}

fn certificate(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).unwrap()
}

#[tokio::test]
async fn a_client_agrees_on_a_version_and_a_protocol_and_is_answered() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), encrypted()).await;
    let provider = || Arc::new(rustls::crypto::ring::default_provider());
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        for (offered, agreed) in [
            (&["http/1.1"][..], Some("http/1.1")),
            (&["x", "http/1.1"], Some("http/1.1")),
            (&[], None),
        ] {
            let mut config = tls_client(None);
            let roots = Arc::new({
                let mut roots = rustls::RootCertStore::empty();
                roots.add(certificate(&data("localhost.crt"))).unwrap();
                roots
            });
            if version.version == rustls::ProtocolVersion::TLSv1_2 {
                config = ClientConfig::builder_with_provider(provider())
                    .with_protocol_versions(&[version])
                    .unwrap()
                    .with_root_certificates(roots)
                    .with_no_client_auth();
            }
            config.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
            let stream = dial_with(&router, config).await.unwrap();
            let session = stream.get_ref().1;
            assert_eq!(session.protocol_version(), Some(version.version));
            assert_eq!(session.alpn_protocol(), agreed.map(str::as_bytes));
            let mut connection = Connection::of(stream);
            for _ in 0..2 {
                connection.request("GET /health HTTP/1.1", b"").await;
                assert_eq!(connection.reply().await.status, 200);
            }
        }
    }
    let mut config = tls_client(None);
    config.alpn_protocols = vec![b"spdy/3".to_vec()];
    assert!(dial_with(&router, config).await.is_err(), "nothing that both speak");
    until("it was counted", || handshakes(&router, "incompatible") == 1.0).await;

    let mut connection = connect(&router, None).await;
    let body = json!({"model": MODEL, "prompt": "x", "stream": true}).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    connection.request(head, body.as_bytes()).await;
    let request = worker.submitted().await.request;
    worker.gives(request, &letters("hello"), None);
    assert_eq!(connection.head().await.status, 200);
    assert!(connection.piece().await.contains("data: "));
    worker.gives(request, &[EOS], Some(Finish::Stop));
    let mut rest = String::new();
    while let Some(piece) = connection.chunk().await {
        rest.push_str(&String::from_utf8(piece).unwrap());
    }
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
}

#[tokio::test]
async fn http2_is_agreed_on_and_answers_side_by_side() {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), encrypted()).await;
    let mut config = tls_client(None);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let stream = dial_with(&router, config).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let mut answers = Vec::new();
    for _ in 0..3 {
        let request = hyper::Request::post("https://localhost/v1/completions").body(()).unwrap();
        let (answer, mut body) = client.send_request(request, false).unwrap();
        let json = json!({"model": MODEL, "prompt": "x"}).to_string();
        body.send_data(bytes::Bytes::from(json), true).unwrap();
        answers.push((answer, worker.submitted().await.request));
    }
    for (answer, request) in answers.into_iter().rev() {
        worker.gives(request, &[EOS], Some(Finish::Stop));
        assert_eq!(in_time("an answer", answer).await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn plain_http_is_told_where_to_go() {
    let router = TestRouter::start(encrypted()).await;
    for head in
        ["GET /health HTTP/1.1", "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json"]
    {
        let mut plain = router.connect().await;
        plain.request(head, &[b'x'; 20_000]).await;
        let reply = plain.reply().await;
        assert_eq!((reply.status, &reply.error()["code"]), (400, &"https_only".into()));
        plain.closed().await;
    }
    assert_eq!(handshakes(&router, "plain_http"), 2.0);
    // what is neither is closed, with TLS's own words
    let mut noise = router.connect().await;
    noise.stream.write_all(&[0xff; 100]).await.unwrap();
    noise.closed().await;
    until("it was counted", || handshakes(&router, "no_tls") == 1.0).await;
    let mut connection = connect(&router, None).await;
    connection.request("GET /health HTTP/1.1", b"").await;
    assert_eq!(connection.reply().await.status, 200);
}

#[tokio::test]
async fn where_clients_need_a_certificate_others_are_refused() {
    let tls_client_ca = Some(data("tls/ca.crt"));
    // every machine may dial, and there are no API keys
    let mut router =
        TestRouter::start(RouterArgs { tls_client_ca, host: "0.0.0.0".into(), ..encrypted() })
            .await;
    router.address.set_ip([127, 0, 0, 1].into());
    for (identity, outcome) in [
        (None, "no_certificate"),
        (Some("other_client"), "bad_certificate"),
        (Some("expired_client"), "bad_certificate"),
    ] {
        let before = handshakes(&router, outcome);
        // of TLS 1.3 the client's part is over before it hears that it is refused
        let mut refused = connect(&router, identity).await;
        let _ = refused.stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        let mut answer = Vec::new();
        let error =
            in_time("the refusal", refused.stream.read_to_end(&mut answer)).await.unwrap_err();
        assert!(answer.is_empty() && error.to_string().contains("alert"), "{identity:?}: {error}");
        until("it was counted", || handshakes(&router, outcome) == before + 1.0).await;
    }
    let mut connection = connect(&router, Some("client")).await;
    connection.request("GET /health HTTP/1.1", b"").await;
    assert_eq!(connection.reply().await.status, 200);
}

#[tokio::test]
async fn certificates_change_while_it_serves_and_a_bad_pair_changes_nothing() {
    let pair = Pair::new("reload");
    let router = TestRouter::start(pair.args()).await;
    let reloads = |outcome: &str| {
        let labels = format!("files=\"client_tls\",outcome=\"{outcome}\"");
        metric(&router.app, "headrace_reloads_total", &labels)
    };
    let refused = || metric(&router.app, "headrace_reloads_refused", "");
    let mut old = connect(&router, None).await;
    assert_eq!(shown(&old), certificate(&data("localhost.crt")));

    // a key that is not the certificate's, half a file, and none
    let bad: [&dyn Fn(); 3] = [
        &|| pair.take("tls/renewed.crt", "localhost.key"),
        &|| std::fs::write(pair.cert(), "-----BEGIN CERTIFICATE-----\nMIIB").unwrap(),
        &|| std::fs::remove_file(pair.key()).unwrap(),
    ];
    for make in bad {
        let before = reloads("refused");
        make();
        router.reload.ask();
        until("it was refused", || reloads("refused") > before).await;
        until("and is said to be", || refused() == 1.0).await;
        assert_eq!(shown(&connect(&router, None).await), certificate(&data("localhost.crt")));
    }
    pair.take("tls/renewed.crt", "tls/renewed.key");
    router.reload.ask();
    until("it was loaded", || reloads("loaded") > 0.0).await;
    until("and nothing is refused", || refused() == 0.0).await;
    assert_eq!(shown(&connect(&router, None).await), certificate(&data("tls/renewed.crt")));
    old.request("GET /health HTTP/1.1", b"").await;
    assert_eq!(old.reply().await.status, 200, "a connection stays as it is");
}

#[tokio::test]
async fn an_address_of_operators_that_others_reach_is_encrypted_too() {
    let listen = ["0.0.0.0:0", "127.0.0.1:0"].map(str::to_owned).to_vec();
    let admin_key = vec!["op".into()];
    let router =
        TestRouter::start(RouterArgs { admin_listen: listen, admin_key, ..encrypted() }).await;
    let [WorkerListen::Tcp(far), WorkerListen::Tcp(near)] = &router.operators[..] else { panic!() };
    let far = far.replace("0.0.0.0", "127.0.0.1");
    let get = "GET /workers HTTP/1.1\r\nAuthorization: Bearer op";
    let mut config = tls_client(None);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let stream = TcpStream::connect(&far).await.unwrap();
    let stream =
        TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream);
    let stream = in_time("TLS", stream).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]), "what it speaks there");
    let mut operator = Connection::of(stream);
    operator.request(get, b"").await;
    assert_eq!(operator.reply().await.status, 200);
    let mut plain = Connection::of(TcpStream::connect(&far).await.unwrap());
    plain
        .stream
        .write_all(b"GET /workers HTTP/1.1\r\nAuthorization: Bearer op\r\n\r\n")
        .await
        .unwrap();
    assert!(!plain.until_closed().await.starts_with(b"HTTP"), "nothing in the clear");
    let mut near = Connection::of(TcpStream::connect(near).await.unwrap());
    near.request(get, b"").await;
    assert_eq!(near.reply().await.status, 200);
}

#[tokio::test]
async fn a_change_is_found_by_itself() {
    let pair = Pair::new("watch");
    let router = TestRouter::start(pair.args()).await;
    let loaded = || metric(&router.app, "headrace_reloads_total", "outcome=\"loaded\"");
    pair.take("tls/renewed.crt", "tls/renewed.key");
    until("the next look", || loaded() > 0.0).await;
    assert_eq!(shown(&connect(&router, None).await), certificate(&data("tls/renewed.crt")));
}

#[tokio::test]
async fn a_handshake_that_does_not_end_is_ended_and_many_make_room() {
    let args = RouterArgs { header_timeout_ms: 300, max_connections: 64, ..encrypted() };
    let router = TestRouter::start(args).await;
    let open = || metric(&router.app, "headrace_tls_handshakes_open", "");
    // nothing, one byte, and half of a hello
    for begin in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"] {
        let mut half = router.connect().await;
        half.stream.write_all(begin).await.unwrap();
        assert_eq!(half.closed().await, 0);
    }
    until("they were counted", || handshakes(&router, "late") == 3.0 && open() == 0.0).await;
    router.get_over_tls().await;

    let args = RouterArgs { max_connections: 64, ..encrypted() };
    let router = TestRouter::start(args).await;
    let mut silent = Vec::new();
    for _ in 0..16 {
        silent.push(router.connect().await);
    }
    // a sixteenth of all connections may be one host's that have said nothing
    until("they made room", || handshakes(&router, "turned_out") == 12.0).await;
    for gone in &mut silent[..12] {
        gone.closed().await;
    }
    router.get_over_tls().await;
    router.stopper.drain();
    for held in &mut silent[12..] {
        held.closed().await;
    }
}

impl TestRouter {
    async fn get_over_tls(&self) {
        let mut connection = connect(self, None).await;
        connection.request("GET /health HTTP/1.1", b"").await;
        assert_eq!(connection.reply().await.status, 200);
    }
}

#[tokio::test]
async fn who_hangs_up_gives_its_answer_up_and_who_does_not_read_is_cut_off() {
    let args = RouterArgs { stall_timeout_ms: 300, ..encrypted() };
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let body = json!({"model": MODEL, "prompt": "x", "stream": true}).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";
    for says_so in [true, false] {
        let mut connection = connect(&router, None).await;
        connection.request(head, body.as_bytes()).await;
        let request = worker.submitted().await.request;
        worker.gives(request, &letters("a"), None);
        assert_eq!(connection.head().await.status, 200);
        if says_so {
            connection.stream.shutdown().await.unwrap(); // and does not close
        }
        let kept = says_so.then_some(connection);
        assert_eq!(worker.cancelled().await, request);
        drop(kept);
    }
    let stalled = || metric(&router.app, "headrace_http_connections_stalled_total", "");
    let mut deaf = connect(&router, None).await;
    let get = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
    let asks = async {
        while deaf.stream.write_all(&get).await.is_ok() && deaf.stream.flush().await.is_ok() {}
    };
    tokio::select! {
        () = asks => {}
        () = until("it was cut off", || stalled() == 1.0) => {}
    }
    until("it was counted", || stalled() == 1.0).await;
}
