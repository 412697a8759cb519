//! Answers to clients that hyper does not talk to.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use super::guarded::Plain;
use super::socket::Socket;

/// The head of a request came too slowly.
pub(super) const HEADERS_TOO_SLOW: LastWords = LastWords {
    head: "408 Request Timeout",
    body: r#"{"error":{"message":"the headers of the request were too slow","type":"invalid_request_error","param":null,"code":"headers_too_slow"}}"#,
};
/// The body of a request came so slowly that its place went to others.
pub(super) const BODY_TOO_SLOW: LastWords = LastWords {
    head: "408 Request Timeout\r\nretry-after: 1",
    body: r#"{"error":{"message":"the body of the request came slowly, and all connections are taken; try again later","type":"invalid_request_error","param":null,"code":"body_too_slow"}}"#,
};
/// `--max-connections` are open, and none of them can be closed.
pub(super) const TOO_MANY: LastWords = LastWords {
    head: "503 Service Unavailable\r\nretry-after: 1",
    body: r#"{"error":{"message":"too many connections; try again later","type":"overloaded_error","param":null,"code":"too_many_connections"}}"#,
};

/// Plain HTTP came where TLS is spoken.
pub(super) const HTTPS_ONLY: LastWords = LastWords {
    head: "400 Bad Request",
    body: r#"{"error":{"message":"this port speaks TLS; ask for https:// in the place of http://","type":"invalid_request_error","param":null,"code":"https_only"}}"#,
};

/// For them to be sent, and for a client to read them.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Pieces of 4 KiB that a client may send after them: a request with a short body.
const LINGER_READS: usize = 32;

pub(super) struct LastWords {
    head: &'static str,
    body: &'static str,
}

impl LastWords {
    /// Sends them, and no more.
    pub(super) async fn say(self, socket: &Socket) {
        self.say_to(&mut Plain(socket)).await;
    }

    /// The same to what is no connection yet.
    pub(super) async fn say_to(self, writer: &mut (impl AsyncWrite + Unpin)) {
        let Self { head, body } = self;
        let len = body.len();
        let words = format!(
            "HTTP/1.1 {head}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}"
        );
        let _ = timeout(LAST_WORDS, async {
            writer.write_all(words.as_bytes()).await?;
            writer.shutdown().await
        })
        .await;
    }
}

/// Takes what a client still sends until it hangs up, for a bounded time: a socket that is closed with bytes that nobody
/// read takes back what was said last.
pub(super) async fn linger(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let _ = timeout(LAST_WORDS, async {
        stream.shutdown().await?;
        let mut taken = [0; 4 << 10];
        for _ in 0..LINGER_READS {
            if stream.read(&mut taken).await? == 0 {
                break;
            }
        }
        std::io::Result::Ok(())
    })
    .await;
}
