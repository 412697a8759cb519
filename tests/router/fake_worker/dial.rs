//! The worker's end of a link: a connection, and frames on it.

use std::sync::Arc;

use headrace_router::config::WorkerListen;
use headrace_router::core::frame::*;
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
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

/// A connection over TLS to a router with the certificate `trusted` (PEM).
pub(crate) async fn dial_tls(address: &WorkerListen, trusted: &[u8]) -> (Reader, Writer) {
    let WorkerListen::Tcp(address) = address else { panic!("{address} is no TCP address") };
    let mut roots = rustls::RootCertStore::empty();
    for cert in CertificateDer::pem_slice_iter(trusted) {
        roots.add(cert.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
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
