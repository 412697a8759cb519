//! Requests that a proxy may read another way than we do: byte by byte, as no client library sends them.

use tokio::io::AsyncWriteExt as _;

use super::super::client::{Connection, Reply, TestRouter, args};

async fn raw(router: &TestRouter, bytes: &[u8]) -> (Reply, Connection) {
    let mut connection = router.connect().await;
    connection.stream.write_all(bytes).await.unwrap();
    (connection.reply().await, connection)
}

#[tokio::test]
async fn what_two_servers_may_read_in_two_ways_is_400_and_ends_the_connection() {
    let router = TestRouter::start(args()).await;
    let post = "POST /tokenize HTTP/1.1\r\n";
    let chunked = "Transfer-Encoding: chunked\r\n";
    let smuggled = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let table = [
        // whom it is for
        ("GET /health HTTP/1.1\r\n\r\n".to_owned(), "Host is missing"),
        (
            "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n".into(),
            "more than once",
        ),
        (
            "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n".into(),
            "more than once",
        ),
        ("GET /health HTTP/1.1\r\nHost:\r\n\r\n".into(), "no name"),
        ("GET /health HTTP/1.1\r\nHost: a b\r\n\r\n".into(), "no name"),
        ("GET /health HTTP/1.1\r\nHost: localhost, evil.com\r\n\r\n".into(), "no name"),
        ("GET /health HTTP/1.1\r\nHost: user@localhost\r\n\r\n".into(), "no name"),
        ("GET /health HTTP/1.1\r\nHost: localhost/x\r\n\r\n".into(), "no name"),
        ("GET /health HTTP/1.1\r\nHost: localhost:80:81\r\n\r\n".into(), "no name"),
        (format!("GET /health HTTP/1.1\r\nHost: {}\r\n\r\n", "a,".repeat(2_000)), "no name"),
        ("GET http://evil.com/health HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "differ"),
        ("GET http://localhost:1/health HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), "differ"),
        // where its body ends
        (
            format!("{post}Host: localhost\r\n{chunked}{chunked}\r\n0\r\n\r\n{smuggled}"),
            "more than once",
        ),
        (
            format!("{post}Host: localhost\r\nTransfer-Encoding: gzip\r\n{chunked}\r\n0\r\n\r\n"),
            "more than once",
        ),
        (
            format!(
                "{post}Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{smuggled}"
            ),
            "must be chunked",
        ),
        (
            format!(
                "{post}Host: localhost\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"
            ),
            "must be chunked",
        ),
        (
            format!("{post}Host: localhost\r\nTransfer-Encoding: x,chunked\r\n\r\n0\r\n\r\n"),
            "must be chunked",
        ),
    ];
    for (bytes, part) in table {
        let (reply, mut connection) = raw(&router, bytes.as_bytes()).await;
        let error = reply.error();
        assert_eq!((reply.status, &error["code"]), (400, &"bad_framing".into()), "{bytes}");
        assert!(error["message"].as_str().unwrap().contains(part), "{error} for {bytes}");
        assert_eq!(reply.header("connection"), Some("close"), "{bytes}");
        assert_eq!(connection.closed().await, 0, "what came after it was answered: {bytes}");
    }
}

#[tokio::test]
async fn what_hyper_refuses_itself_is_400_without_a_second_answer() {
    let router = TestRouter::start(args()).await;
    let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\n";
    let smuggled = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for bytes in [
        format!("{head}Content-Length: 5\r\nContent-Length: 6\r\n\r\n{{}}"),
        format!("{head}Content-Length: -1\r\n\r\n"),
        format!("{head}Content-Length: 0x2\r\n\r\n{{}}"),
        format!("{head}Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("{head}Transfer-Encoding: gzip\r\n\r\n{smuggled}"),
        format!("{head}X-Fold: a\r\n b\r\n\r\n"),
        format!("{head}X Space: a\r\n\r\n"),
        format!("{head}X-Nul: a\0b\r\n\r\n"),
        format!("{head}Host : evil.com\r\n\r\n"),
        "POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".into(),
    ] {
        let (reply, mut connection) = raw(&router, bytes.as_bytes()).await;
        assert_eq!(reply.status, 400, "{bytes:?}");
        assert_eq!(connection.closed().await, 0, "what came after it was answered: {bytes:?}");
    }
    // with both a length and chunks, the chunks count, and nothing that follows does
    for both in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    ] {
        let bytes = format!("{head}{both}\r\n0\r\n\r\n{smuggled}");
        let (reply, mut connection) = raw(&router, bytes.as_bytes()).await;
        assert_eq!(reply.status, 400, "an empty body");
        assert_eq!(connection.closed().await, 0, "{both}");
    }
}

#[tokio::test]
async fn one_host_is_enough_however_it_is_written() {
    let router = TestRouter::start(args()).await;
    for bytes in [
        "GET /health HTTP/1.1\r\nhOsT:  LOCALHOST:1 \r\n\r\n",
        "GET http://localhost:8000/health HTTP/1.1\r\nHost: localhost:8000\r\n\r\n",
        "GET /health HTTP/1.0\r\n\r\n",
        "GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n",
    ] {
        assert_eq!(raw(&router, bytes.as_bytes()).await.0.status, 200, "{bytes}");
    }
    let chunks = "POST /detokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    assert_ne!(raw(&router, chunks.as_bytes()).await.0.error()["code"], "bad_framing");
}

#[tokio::test]
async fn a_body_that_comes_after_its_answer_is_no_request() {
    let router = TestRouter::start(args()).await;
    let inside = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut connection = router.connect().await;
    let head = format!(
        "POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        inside.len()
    );
    connection.stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(connection.reply().await.status, 404, "nothing of its body is needed for that");
    // The client may find its connection closed.
    let _ = connection.stream.write_all(inside.as_bytes()).await;
    let _ = connection
        .stream
        .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .await;
    let answers = String::from_utf8(connection.until_closed().await).unwrap();
    assert!(!answers.contains("version"), "{answers}");
    assert!(answers.matches("HTTP/1.1 ").count() <= 1, "{answers}");
}
