//! A collector: takes OTLP over HTTP on a real socket, and shows the spans that came.

use std::collections::BTreeMap;
use std::sync::Arc;

use headrace_router::config::{RouterArgs, TracesVariables};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

use super::super::super::client::args;
use crate::fake_worker::in_time;

/// A span as it came.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) name: String,
    pub(super) trace: String,
    pub(super) id: String,
    /// Empty at the root.
    pub(super) parent: String,
    pub(super) kind: SpanKind,
    pub(super) state: String,
    /// With those of the resource.
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) events: Vec<String>,
    /// `None` where nothing was said; the text of an error otherwise.
    pub(super) error: Option<String>,
    pub(super) nanos: (u64, u64),
}

impl Seen {
    pub(super) fn says(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }
}

/// What it answers, request by request; the last answer is repeated. `None` answers nothing and keeps the connection.
pub(super) type Answers = Vec<Option<&'static str>>;

pub(super) const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

pub(super) struct FakeCollector {
    pub(super) url: String,
    spans: mpsc::UnboundedReceiver<Seen>,
    /// All that came so far.
    seen: Vec<Seen>,
}

impl FakeCollector {
    pub(super) async fn start() -> Self {
        Self::answering(vec![Some(OK)]).await
    }

    pub(super) async fn answering(answers: Answers) -> Self {
        Self::serve(answers, None).await
    }

    pub(super) async fn over_tls(tls: TlsAcceptor) -> Self {
        Self::serve(vec![Some(OK)], Some(tls)).await
    }

    async fn serve(answers: Answers, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let (tell, spans) = mpsc::unbounded_channel();
        let mut answers = answers.into_iter().peekable();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answer = *answers.peek().unwrap();
                if answers.len() > 1 {
                    answers.next();
                }
                let (tell, tls) = (tell.clone(), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => exchange(stream, answer, &tell).await,
                        Some(tls) => {
                            // whom the client does not trust it tells here
                            let Ok(stream) = tls.accept(stream).await else { return };
                            exchange(stream, answer, &tell).await;
                        }
                    }
                });
            }
        });
        Self { url: format!("{scheme}://localhost:{port}"), spans, seen: Vec::new() }
    }

    /// Flags of a router that sends its spans here.
    pub(super) fn args(&self) -> RouterArgs {
        RouterArgs {
            otlp_endpoint: Some(self.url.clone()),
            otlp: TracesVariables::default(),
            ..args()
        }
    }

    /// All spans once this one, and those that end before it, have come: a request's own ends last.
    pub(super) async fn until(&mut self, wanted: impl Fn(&Seen) -> bool) -> &[Seen] {
        while !self.seen.iter().any(&wanted) {
            let next = in_time("a span", self.spans.recv()).await;
            self.seen.push(next.expect("the collector lives"));
        }
        while let Ok(next) = self.spans.try_recv() {
            self.seen.push(next);
        }
        &self.seen
    }

    /// How many came so far.
    pub(super) fn count(&mut self) -> usize {
        while let Ok(next) = self.spans.try_recv() {
            self.seen.push(next);
        }
        self.seen.len()
    }
}

async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: Option<&'static str>,
    tell: &mpsc::UnboundedSender<Seen>,
) {
    let Some(body) = posted(&mut stream).await else { return };
    let Some(answer) = answer else { std::future::pending().await };
    if answer.starts_with("HTTP/1.1 200") {
        for span in spans(&body) {
            let _ = tell.send(span);
        }
    }
    let _ = stream.write_all(answer.as_bytes()).await;
    let _ = stream.shutdown().await;
}

/// The body of a POST, which has to be as the protocol wants it.
async fn posted(stream: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes.drain(..end + 4).collect()).unwrap().to_lowercase();
    assert!(head.starts_with("post /v1/traces http/1.1\r\n"), "{head}");
    assert!(head.contains("\r\ncontent-type: application/x-protobuf\r\n"), "{head}");
    assert!(head.contains("\r\nhost: localhost:"), "{head}");
    let length = head.split("content-length: ").nth(1).unwrap().split('\r').next().unwrap();
    let length: usize = length.parse().unwrap();
    while bytes.len() < length {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    Some(bytes)
}

fn spans(body: &[u8]) -> Vec<Seen> {
    let request = ExportTraceServiceRequest::decode(body).expect("it is OTLP");
    let mut all = Vec::new();
    for resource in request.resource_spans {
        let of_resource = texts(&resource.resource.unwrap().attributes);
        for scope in resource.scope_spans {
            assert_eq!(scope.scope.unwrap().name, "headrace-router");
            for span in scope.spans {
                let status = span.status.clone().unwrap_or_default();
                let mut attributes = of_resource.clone();
                attributes.extend(texts(&span.attributes));
                all.push(Seen {
                    kind: span.kind(),
                    name: span.name,
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    state: span.trace_state,
                    attributes,
                    events: span.events.into_iter().map(|event| event.name).collect(),
                    error: (status.code == 2).then_some(status.message),
                    nanos: (span.start_time_unix_nano, span.end_time_unix_nano),
                });
            }
        }
    }
    all
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|any| any.value.clone()) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(truth)) => truth.to_string(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|one| (one.key.clone(), text(&one.value))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A server that shows the certificate of the tests for `localhost`.
pub(super) fn tls_of_localhost() -> TlsAcceptor {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let file = |name| crate::fake_worker::data(name);
    let chain = CertificateDer::pem_file_iter(file("localhost.crt")).unwrap();
    let chain = chain.collect::<Result<Vec<_>, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(file("localhost.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}
