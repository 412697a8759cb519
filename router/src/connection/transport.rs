//! What the bytes of a client go through: its socket as it is, or TLS on it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// A connection's stream. Whoever writes to the socket itself asks for [`Self::plain`] first.
pub(super) enum Transport {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Transport {
    /// The socket, where bytes are written to it as they are.
    pub(super) fn plain(&self) -> Option<&TcpStream> {
        match self {
            Self::Plain(socket) => Some(socket),
            Self::Tls(_) => None,
        }
    }

    fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Bytes came that nobody has read yet.
    pub(super) fn has_unread(&self) -> bool {
        rustix::io::ioctl_fionread(self.socket()).is_ok_and(|bytes| bytes > 0)
    }

    pub(super) fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.socket().set_nodelay(nodelay)
    }

    /// What went wrong with the socket since it was asked last.
    pub(super) fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.socket().take_error()
    }
}

impl From<TcpStream> for Transport {
    fn from(socket: TcpStream) -> Self {
        Self::Plain(socket)
    }
}

/// Calls the same method of whichever stream it is.
macro_rules! either {
    ($transport:ident.$method:ident($($argument:expr),*)) => {
        match $transport.get_mut() {
            Self::Plain(stream) => Pin::new(stream).$method($($argument),*),
            Self::Tls(stream) => Pin::new(stream.as_mut()).$method($($argument),*),
        }
    };
}

impl AsyncRead for Transport {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self.poll_read(context, buffer))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self.poll_write_vectored(context, parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.poll_shutdown(context))
    }
}
