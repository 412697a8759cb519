//! HTTP/2 by clients that send frames without end: resets, heads in pieces, headers that unfold, frames that carry nothing. The connection ends
//! by its protocol's own word or by a deadline, and the next client is served.

use headrace_router::core::frame::Finish;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::super::client::{Connection, TestRouter, args};
use crate::fake_worker::{Behaviour, MODEL, in_time, letters, metric, until};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ENHANCE_YOUR_CALM: u32 = 0xb;

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&len[1..], &[kind, flags], &stream.to_be_bytes(), body].concat()
}

/// `GET /health` or `POST /tokenize` as HPACK has it, of which nothing is kept.
fn head(method: u8, path: &str) -> Vec<u8> {
    let text = |index: u8, text: &str| {
        [&[index, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
    };
    [vec![method, 0x86], text(0x04, path), text(0x01, "localhost")].concat()
}

/// A `POST` whose body is read.
fn posts(path: &str) -> Vec<u8> {
    [&head(POST, path)[..], &[0x0f, 0x10, 16], b"application/json"].concat()
}

/// As HPACK has it.
const STATUS_200: u8 = 0x88;
const GET: u8 = 0x82;
const POST: u8 = 0x83;

async fn connect(router: &TestRouter) -> Connection {
    let mut connection = router.connect().await;
    connection.stream.write_all(PREFACE).await.unwrap();
    connection.stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    connection
}

/// The code of the last `GOAWAY` in what a server sent until it closed the connection.
fn goodbye(mut bytes: &[u8]) -> Option<u32> {
    let mut code = None;
    while let Some((head, rest)) = bytes.split_at_checked(9) {
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some((body, rest)) = rest.split_at_checked(len) else { break };
        if head[3] == GOAWAY {
            code = Some(u32::from_be_bytes(body[4..8].try_into().unwrap()));
        }
        bytes = rest;
    }
    code
}

/// Streams that were answered, and the first byte of each answer's head.
fn answers(mut bytes: &[u8]) -> Vec<(u32, u8)> {
    let mut answers = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(9) {
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some((body, rest)) = rest.split_at_checked(len) else { break };
        if head[3] == HEADERS {
            answers.push((u32::from_be_bytes(head[5..9].try_into().unwrap()), body[0]));
        }
        bytes = rest;
    }
    answers
}

/// Sends `piece` of each number until the connection takes no more; what the server said meanwhile and until it closed.
async fn flood(connection: &mut Connection, mut piece: impl FnMut(u32) -> Vec<u8>) -> Vec<u8> {
    let mut heard = Vec::new();
    let sent = async {
        for number in 0..2_000_000 {
            let (mut reader, mut writer) = connection.stream.split();
            let bytes = piece(number);
            let mut buffer = [0; 16 << 10];
            tokio::select! {
                written = writer.write_all(&bytes) => if written.is_err() { return },
                // a client that reads keeps nobody waiting
                read = reader.read(&mut buffer) => match read {
                    Ok(0) | Err(_) => return,
                    Ok(read) => heard.extend_from_slice(&buffer[..read]),
                },
            }
        }
        panic!("nothing ended it");
    };
    in_time("the end of the flood", sent).await;
    heard.extend(connection.until_closed().await);
    heard
}

async fn serves_on(router: &TestRouter) {
    assert_eq!(router.get("/health").await.status, 200);
    until("nothing is left", || metric(&router.app, "headrace_http_connections", "") == 0.0).await;
}

#[tokio::test]
async fn requests_that_are_taken_back_at_once_end_the_connection() {
    let router = TestRouter::start(args()).await;
    let mut connection = connect(&router).await;
    let heard = flood(&mut connection, |n| {
        let stream = 2 * n + 1;
        let request = frame(HEADERS, END_STREAM | END_HEADERS, stream, &head(GET, "/health"));
        [request, frame(RST_STREAM, 0, stream, &8u32.to_be_bytes())].concat()
    })
    .await;
    // the word may be lost where frames still came when the socket was closed
    assert!(matches!(goodbye(&heard), None | Some(ENHANCE_YOUR_CALM)), "{:?}", goodbye(&heard));
    drop(connection);
    serves_on(&router).await;
}

#[tokio::test]
async fn a_head_that_does_not_end_ends_the_connection() {
    for piece in [&[0x00, 1, b'a', 1, b'b'].repeat(3_000)[..], &[]] {
        let router = TestRouter::start(args()).await;
        let mut connection = connect(&router).await;
        connection.stream.write_all(&frame(HEADERS, 0, 1, &head(GET, "/health"))).await.unwrap();
        flood(&mut connection, |_| frame(CONTINUATION, 0, 1, piece)).await;
        drop(connection);
        serves_on(&router).await;
    }
}

#[tokio::test]
async fn a_header_that_unfolds_ten_thousand_times_is_no_head() {
    let router = TestRouter::start(args()).await;
    let mut connection = connect(&router).await;
    // one header of 4,000 bytes is kept in the table, and named 10,000 times: 40 MB in 14 KB
    let mut bomb = head(GET, "/health");
    bomb.extend([0x40, 1, b'x', 0x7f, 0xa1, 0x1e]);
    bomb.extend([b'y'; 4_000]);
    bomb.extend([0xbe; 10_000]);
    let bomb = frame(HEADERS, END_STREAM | END_HEADERS, 1, &bomb);
    let next = frame(HEADERS, END_STREAM | END_HEADERS, 3, &head(GET, "/health"));
    connection.stream.write_all(&[bomb, next].concat()).await.unwrap();
    // either the connection is over, or the next request on it is answered and this one was not
    let mut heard = Vec::new();
    let answers = loop {
        let read = in_time("an answer", connection.stream.read_buf(&mut heard)).await.unwrap_or(0);
        let answers = answers(&heard);
        if read == 0 || answers.iter().any(|(stream, _)| *stream == 3) {
            break answers;
        }
    };
    assert!(!answers.contains(&(1, STATUS_200)), "{answers:?}");
    assert!(metric(&router.app, "headrace_http_requests_total", "") <= 1.0);
    drop(connection);
    serves_on(&router).await;
}

/// How many were ended as floods.
fn floods(router: &TestRouter) -> f64 {
    metric(&router.app, "headrace_http_connections_flooding_total", "")
}

#[tokio::test]
async fn frames_that_carry_nothing_end_the_connection_by_name() {
    let window = frame(WINDOW_UPDATE, 0, 0, &1u32.to_be_bytes());
    for piece in [frame(PING, 0, 0, &[7; 8]), frame(SETTINGS, 0, 0, &[]), window] {
        let router = TestRouter::start(args()).await;
        let mut connection = connect(&router).await;
        let heard = flood(&mut connection, |_| piece.repeat(100)).await;
        assert!(matches!(goodbye(&heard), None | Some(ENHANCE_YOUR_CALM)), "{:?}", goodbye(&heard));
        assert_eq!(floods(&router), 1.0, "{piece:?}");
        drop(connection);
        serves_on(&router).await;
    }
}

#[tokio::test]
async fn a_body_of_nothing_ends_the_connection_however_many_frames_it_has() {
    let router = TestRouter::start(args()).await;
    let mut connection = connect(&router).await;
    let request = frame(HEADERS, END_HEADERS, 1, &posts("/tokenize"));
    connection.stream.write_all(&request).await.unwrap();
    let heard = flood(&mut connection, |_| frame(DATA, 0, 1, &[]).repeat(100)).await;
    assert!(matches!(goodbye(&heard), None | Some(ENHANCE_YOUR_CALM)), "{:?}", goodbye(&heard));
    drop(connection);
    serves_on(&router).await;
}

#[tokio::test]
async fn a_flood_is_told_to_calm_down() {
    let router = TestRouter::start(args()).await;
    let mut connection = connect(&router).await;
    // a few more than there may be, and nothing behind them that would take the last word back
    connection.stream.write_all(&frame(PING, 0, 0, &[7; 8]).repeat(350)).await.unwrap();
    assert_eq!(goodbye(&connection.until_closed().await), Some(ENHANCE_YOUR_CALM));
}

#[tokio::test]
async fn requests_that_wait_for_nothing_are_answered_in_slots() {
    const REQUESTS: usize = 1_000;
    let router = TestRouter::start(args()).await;
    let stream = tokio::net::TcpStream::connect(router.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let begin = tokio::time::Instant::now();
    for _ in 0..REQUESTS / 100 {
        let mut answers = Vec::new();
        for _ in 0..100 {
            client = in_time("room", client.ready()).await.unwrap();
            let request = hyper::Request::get("http://localhost/health").body(()).unwrap();
            answers.push(client.send_request(request, true).unwrap().0);
        }
        for answer in answers {
            assert_eq!(in_time("an answer", answer).await.unwrap().status(), 200);
        }
    }
    // those of the first hundred are not known to be many before they are answered
    assert!(begin.elapsed() >= std::time::Duration::from_millis(70), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn who_pings_and_reads_nothing_is_cut_off() {
    let router = TestRouter::start(args()).await;
    let mut connection = connect(&router).await;
    let pings = frame(PING, 0, 0, &[7; 8]).repeat(1_000);
    let sends = async { while connection.stream.write_all(&pings).await.is_ok() {} };
    in_time("the end of the flood", sends).await;
    until("it was counted", || floods(&router) == 1.0).await;
    drop(connection);
    serves_on(&router).await;
}

#[tokio::test]
async fn who_is_sent_much_may_say_as_much_about_it() {
    const TOKENS: usize = 600;
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connection = connect(&router).await;
    let json =
        format!(r#"{{"model": "{MODEL}", "prompt": "x", "max_tokens": {TOKENS}, "stream": true}}"#);
    let asks = [
        frame(HEADERS, END_HEADERS, 1, &posts("/v1/completions")),
        frame(DATA, END_STREAM, 1, json.as_bytes()),
    ];
    connection.stream.write_all(&asks.concat()).await.unwrap();
    let request = worker.submitted().await.request;
    // 1,200 windows and 600 pings for as many tokens
    let window = frame(WINDOW_UPDATE, 0, 0, &1_000u32.to_be_bytes());
    let thanks =
        [window.clone(), frame(WINDOW_UPDATE, 0, 1, &window[9..]), frame(PING, 0, 0, &[7; 8])]
            .concat();
    let mut heard = Vec::new();
    for n in 1..=TOKENS {
        worker.gives(request, &letters("a"), (n == TOKENS).then_some(Finish::Length));
        let events = |heard: &[u8]| heard.windows(9).filter(|at| at == b"\"text\":\"a").count();
        while events(&heard) < n {
            let read = in_time("a token", connection.stream.read_buf(&mut heard)).await.unwrap();
            assert!(read > 0, "it was cut off after {n} tokens");
        }
        connection.stream.write_all(&thanks).await.unwrap();
    }
    assert_eq!(floods(&router), 0.0);
    drop(connection);
    serves_on(&router).await;
}
