//! The little of etcd that a router needs: a lease and a key under it, over the JSON gateway (`/v3/...`, plain HTTP).

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// For one call at one endpoint.
const CALL: Duration = Duration::from_secs(2);
/// Longest answer; ours have some hundred bytes.
const ANSWER_BYTES: usize = 1 << 20;

/// Why etcd did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdError {
    /// No endpoint answered; this is what the last one of them met with.
    #[error("{endpoint}: {reason}")]
    Unreachable { endpoint: String, reason: String },
    /// It answered something else.
    #[error("an answer of no use: {0}")]
    Answer(String),
}

impl EtcdError {
    /// As a word, for metrics.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "etcd_unreachable",
            Self::Answer(_) => "etcd_answer",
        }
    }
}

/// A lease, by the name that etcd gave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeaseId(String);

/// The members of one etcd. The one that answered last is asked first.
#[derive(Debug)]
pub(super) struct Etcd {
    endpoints: Vec<String>,
    next: usize,
}

impl Etcd {
    /// `endpoints` are `HOST:PORT`, at least one.
    pub(super) fn new(endpoints: Vec<String>) -> Self {
        Self { endpoints, next: 0 }
    }

    /// A new lease.
    pub(super) async fn grant(&mut self, ttl: Duration) -> Result<LeaseId, EtcdError> {
        let answer = self.call("/v3/lease/grant", json!({"TTL": ttl.as_secs()})).await?;
        let id = answer["ID"].as_str().filter(|id| !id.is_empty());
        id.map(|id| LeaseId(id.to_owned())).ok_or_else(|| EtcdError::Answer(clip(&answer)))
    }

    /// Sets a key that goes with the lease.
    pub(super) async fn put(
        &mut self,
        key: &str,
        value: &str,
        lease: &LeaseId,
    ) -> Result<(), EtcdError> {
        let (key, value) = (base64::encode(key), base64::encode(value));
        let body = json!({"key": key, "value": value, "lease": lease.0});
        self.call("/v3/kv/put", body).await.map(drop)
    }

    /// False once the lease is over.
    pub(super) async fn keep_alive(&mut self, lease: &LeaseId) -> Result<bool, EtcdError> {
        let answer = self.call("/v3/lease/keepalive", json!({"ID": lease.0})).await?;
        let Some(result) = answer.get("result") else {
            return Err(EtcdError::Answer(clip(&answer)));
        };
        // a number as text; left out where it is 0
        Ok(result["TTL"].as_str().and_then(|ttl| ttl.parse::<i64>().ok()).unwrap_or(0) > 0)
    }

    /// Ends a lease and removes its keys.
    pub(super) async fn revoke(&mut self, lease: &LeaseId) -> Result<(), EtcdError> {
        self.call("/v3/lease/revoke", json!({"ID": lease.0})).await.map(drop)
    }

    /// Asks the endpoints one after the other until one answers.
    async fn call(&mut self, path: &str, body: Value) -> Result<Value, EtcdError> {
        let body = Bytes::from(body.to_string());
        let mut failed = None;
        for _ in 0..self.endpoints.len() {
            let endpoint = &self.endpoints[self.next];
            let reason = match timeout(CALL, post(endpoint, path, body.clone())).await {
                Ok(Ok((200, answer))) => return read(&answer),
                // an unknown lease has a status of its own, and another member knows it no better
                Ok(Ok((404, answer))) => return read(&answer),
                Ok(Ok((status, answer))) => {
                    format!("status {status}: {}", clip(&String::from_utf8_lossy(&answer)))
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {CALL:?}"),
            };
            failed = Some(EtcdError::Unreachable { endpoint: endpoint.clone(), reason });
            self.next = (self.next + 1) % self.endpoints.len();
        }
        Err(failed.expect("config wants at least one endpoint"))
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

async fn post(endpoint: &str, path: &str, body: Bytes) -> Result<(u16, Bytes), BoxError> {
    let stream = TcpStream::connect(endpoint).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = hyper::Request::post(path)
        .header("host", endpoint)
        .header("content-type", "application/json")
        .body(Full::new(body))?;
    let answer = async move {
        let response = sender.send_request(request).await?;
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), ANSWER_BYTES).collect().await?;
        Ok((status, body.to_bytes()))
    };
    // the connection ends with its sender, which the answer takes along; what breaks it, the answer says
    let (answer, _) = tokio::join!(answer, connection);
    answer
}

/// The first JSON object of an answer; a keep-alive is a stream of them.
fn read(answer: &[u8]) -> Result<Value, EtcdError> {
    let mut objects = serde_json::Deserializer::from_slice(answer).into_iter::<Value>();
    match objects.next() {
        Some(Ok(object @ Value::Object(_))) => Ok(object),
        Some(Ok(other)) => Err(EtcdError::Answer(clip(&other))),
        Some(Err(error)) => Err(EtcdError::Answer(error.to_string())),
        None => Err(EtcdError::Answer("it is empty".into())),
    }
}

fn clip(text: &impl ToString) -> String {
    text.to_string().chars().take(200).collect()
}
