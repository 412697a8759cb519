//! The worker's end of a link: a connection, and frames on it.

use std::path::PathBuf;
use std::sync::Arc;

use headrace_router::config::WorkerListen;
use headrace_router::core::frame::*;
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};

use super::in_time;

pub(crate) type Reader = FrameReader<Box<dyn AsyncRead + Send + Unpin>>;

/// Writes frames, and what is none.
pub(crate) struct Writer(Box<dyn AsyncWrite + Send + Unpin>);

impl Writer {
    pub(super) async fn send(&mut self, frames: &[Frame]) -> std::io::Result<()> {
        let mut writer = FrameWriter::new(&mut self.0);
        for frame in frames {
            writer.push(frame).unwrap();
        }
        writer.flush().await
    }

    pub(crate) async fn raw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.0.write_all(bytes).await?;
        self.0.flush().await
    }
}

/// A connection without any handshake.
pub(crate) async fn dial(address: &WorkerListen) -> (Reader, Writer) {
    let (reader, writer): (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>) =
        match address {
            WorkerListen::Tcp(address) => {
                let stream = TcpStream::connect(address).await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (reader, writer) = stream.into_split();
                (Box::new(reader), Box::new(writer))
            }
            WorkerListen::Unix(path) => {
                let (reader, writer) = UnixStream::connect(path).await.unwrap().into_split();
                (Box::new(reader), Box::new(writer))
            }
        };
    (FrameReader::new(reader, MAX_FRAME_BYTES), Writer(writer))
}

/// A file of `tests/data`.
pub(crate) fn data(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../tests/data", name].iter().collect()
}

/// What trusts the certificates of the tests' servers, and shows `identity`: the name of a certificate and its key.
pub(crate) fn tls_client(identity: Option<&str>) -> rustls::ClientConfig {
    tls_client_trusting(&["localhost.crt", "tls/ca.crt"], identity)
}

fn tls_client_trusting(trusted: &[&str], identity: Option<&str>) -> rustls::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    for trusted in trusted {
        roots.add(CertificateDer::from_pem_file(data(trusted)).unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    match identity {
        None => builder.with_no_client_auth(),
        Some(name) => {
            let file = |ending| data(&format!("tls/{name}.{ending}"));
            let chain = vec![CertificateDer::from_pem_file(file("crt")).unwrap()];
            let key = PrivateKeyDer::from_pem_file(file("key")).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    }
}

/// A connection over TLS to a router whose certificate is trusted; it may be refused while it is read.
pub(crate) async fn dial_tls(address: &WorkerListen, identity: Option<&str>) -> (Reader, Writer) {
    dial_with(address, tls_client(identity)).await
}

/// The same, and only what this certificate vouches for is trusted.
pub(crate) async fn dial_trusting(address: &WorkerListen, trusted: &str) -> (Reader, Writer) {
    dial_with(address, tls_client_trusting(&[trusted], None)).await
}

async fn dial_with(address: &WorkerListen, config: rustls::ClientConfig) -> (Reader, Writer) {
    let WorkerListen::Tcp(address) = address else { panic!("{address} is no TCP address") };
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(address).await.unwrap();
    let stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
    let (reader, writer) = tokio::io::split(stream);
    (FrameReader::new(Box::new(reader), MAX_FRAME_BYTES), Writer(Box::new(writer)))
}

pub(crate) async fn send(writer: &mut Writer, frame: Frame) {
    let _ = writer.send(&[frame]).await; // the router may have closed it: the test sees that when it reads
}

/// The next frame; `None` once the router closed the link.
pub(crate) async fn receive(reader: &mut Reader) -> Option<Frame> {
    in_time("a frame", reader.next()).await.unwrap_or(None)
}
