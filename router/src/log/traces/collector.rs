//! The HTTP client for the collector: one connection for each batch, bounded in time and size.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use axum::http::header::{CONNECTION, HOST, HeaderValue};
use axum::http::uri::{Authority, PathAndQuery};
use axum::http::{Request, Response, Uri};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::TracesError;
use crate::config::TracesConfig;

/// Longest answer that is read: it says how many spans were refused, and why.
const ANSWER_BYTES: usize = 64 << 10;

/// Where spans are sent. It is dialled for each batch, a second apart at least: nothing is kept of a connection that somebody
/// between closes when it rests.
#[derive(Debug)]
pub(super) struct Collector {
    host: String,
    port: u16,
    authority: HeaderValue,
    tls: Option<Tls>,
    timeout: Duration,
    /// Spans that it took the request for, but not them.
    refused: Arc<AtomicU64>,
}

struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.name.fmt(f)
    }
}

impl Collector {
    /// Opens nothing yet.
    ///
    /// # Errors
    /// There are no certificates to check that of the collector with.
    pub(super) fn new(config: &TracesConfig) -> Result<Self, TracesError> {
        let endpoint = &config.endpoint;
        let host = endpoint.host().expect("checked by config");
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let is_tls = endpoint.scheme_str() == Some("https");
        let tls = is_tls.then(|| Tls::new(&host, config.certificate.as_deref())).transpose()?;
        let authority = endpoint.authority().map_or("", Authority::as_str);
        Ok(Self {
            host,
            port: endpoint.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            authority: HeaderValue::from_str(authority).expect("part of a URL"),
            tls,
            timeout: config.timeout,
            refused: Arc::default(),
        })
    }

    /// How many spans were refused since somebody took the number.
    pub(super) fn refused(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.refused)
    }

    async fn post(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        let response = match &self.tls {
            None => self.exchange(stream, request).await?,
            Some(tls) => {
                let stream = tls.connector.connect(tls.name.clone(), stream).await?;
                self.exchange(stream, request).await?
            }
        };
        if response.status().is_success()
            && let Ok(answer) = ExportTraceServiceResponse::decode(&response.body()[..])
            && let Some(some) = answer.partial_success
        {
            let refused = u64::try_from(some.rejected_spans).unwrap_or(0);
            self.refused.fetch_add(refused, Relaxed);
        }
        Ok(response)
    }

    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        request: Request<Bytes>,
    ) -> Result<Response<Bytes>, HttpError> {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // it ends with the exchange; what goes wrong with it the answer says, too
        let _connection = AbortOnDropHandle::new(tokio::spawn(async { connection.await.ok() }));
        let mut request = request.map(Full::new);
        let path = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
        *request.uri_mut() = path.parse::<Uri>()?;
        request.headers_mut().insert(HOST, self.authority.clone());
        request.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        let (parts, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, ANSWER_BYTES).collect().await?.to_bytes();
        Ok(Response::from_parts(parts, body))
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        timeout(self.timeout, self.post(request)).await?
    }
}

impl Tls {
    fn new(host: &str, file: Option<&Path>) -> Result<Self, TracesError> {
        let shown =
            file.map_or("those of this system".to_owned(), |file| file.display().to_string());
        let wrong = |why: String| TracesError::Certificates { file: shown.clone(), why };
        let certificates: Vec<CertificateDer<'static>> = match file {
            Some(file) => CertificateDer::pem_file_iter(file)
                .and_then(Iterator::collect)
                .map_err(|error| wrong(error.to_string()))?,
            None => rustls_native_certs::load_native_certs().certs, // those that can be read
        };
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(certificates);
        if added == 0 {
            return Err(wrong("there is no certificate".into()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name =
            ServerName::try_from(host.to_owned()).map_err(|error| wrong(error.to_string()))?;
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name })
    }
}
