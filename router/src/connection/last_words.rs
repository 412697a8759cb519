//! Answers to clients that hyper does not talk to.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

use super::guarded::Plain;
use super::socket::Socket;

/// The head of a request came too slowly.
pub(super) const HEADERS_TOO_SLOW: LastWords = LastWords {
    head: "408 Request Timeout",
    body: r#"{"error":{"message":"the headers of the request were too slow","type":"invalid_request_error","param":null,"code":"headers_too_slow"}}"#,
};
/// `--max-connections` are open, and none of them rests.
pub(super) const TOO_MANY: LastWords = LastWords {
    head: "503 Service Unavailable\r\nretry-after: 1",
    body: r#"{"error":{"message":"too many connections; try again later","type":"overloaded_error","param":null,"code":"too_many_connections"}}"#,
};

/// For them to be sent.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) struct LastWords {
    head: &'static str,
    body: &'static str,
}

impl LastWords {
    /// Sends them, and no more.
    pub(super) async fn say(self, socket: &Socket) {
        let Self { head, body } = self;
        let len = body.len();
        let words = format!(
            "HTTP/1.1 {head}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}"
        );
        let mut writer = Plain(socket);
        let _ = timeout(LAST_WORDS, async {
            writer.write_all(words.as_bytes()).await?;
            writer.shutdown().await
        })
        .await;
    }
}
