//! What listeners share: a socket with a queue for a burst of dials, the file of a Unix socket that is left over, and which
//! failed accepts call for a pause.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, UnixStream, lookup_host};

/// Connections that the kernel keeps until they are accepted: a burst of dials, such as a thousand workers that have lost
/// their router, loses none. The kernel allows no more than `net.core.somaxconn`, 4,096 unless somebody changed it.
pub(crate) const BACKLOG: u32 = 4_096;
/// What lacks comes back when a connection ends; until then, accepting again and again would only take the processor.
const PAUSE: Duration = Duration::from_millis(10);

/// Binds the first address of `host` that can be bound.
///
/// # Errors
/// There is none; the error is that of the last one.
pub(crate) async fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut last = None;
    for address in lookup_host((host, port)).await? {
        let bound = || {
            let socket = match address {
                std::net::SocketAddr::V4(_) => TcpSocket::new_v4()?,
                std::net::SocketAddr::V6(_) => TcpSocket::new_v6()?,
            };
            socket.set_reuseaddr(true)?; // connections of a router that ended may linger
            socket.bind(address)?;
            socket.listen(BACKLOG)
        };
        match bound() {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{host} has no address"))
    }))
}

/// Takes away what a router that was killed left at `path`: a socket behind which nobody listens.
///
/// # Errors
/// Somebody listens there, or it is no socket: a connection to any other file is refused just as well.
pub(crate) async fn remove_left_over(path: &Path) -> io::Result<()> {
    if !std::fs::metadata(path)?.file_type().is_socket() {
        let error = "there is a file of another kind";
        return Err(io::Error::new(io::ErrorKind::AddrInUse, error));
    }
    match UnixStream::connect(path).await {
        Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Ok(_) | Err(_) => Err(io::ErrorKind::AddrInUse.into()),
    }
}

/// How long to wait after an accept that failed: only where something lacks that all accepts need. Any other failure, such
/// as a client that was gone before it was accepted, is that connection's own.
pub(crate) fn pause_after(error: &io::Error) -> Option<Duration> {
    // the same numbers on all Unix systems, but for the last one
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = if cfg!(target_os = "linux") { 105 } else { 55 };
    match error.raw_os_error()? {
        ENOMEM | ENFILE | EMFILE | ENOBUFS => Some(PAUSE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_all_accepts_lack_calls_for_a_pause() {
        let too_many_files = io::Error::from_raw_os_error(24);
        assert!(pause_after(&too_many_files).is_some_and(|pause| pause <= PAUSE));
        assert!(pause_after(&io::Error::from_raw_os_error(23)).is_some());
        let aborted = io::Error::from(io::ErrorKind::ConnectionAborted);
        assert_eq!(pause_after(&aborted), None);
        assert_eq!(pause_after(&io::Error::from_raw_os_error(103)), None, "ECONNABORTED");
        assert_eq!(pause_after(&io::Error::other("TLS")), None);
    }

    #[tokio::test]
    async fn a_burst_of_dials_waits_in_the_kernel_until_it_is_accepted() {
        const DIALS: usize = 400; // more than the 128 of a listener of the standard library
        let listener = listen("127.0.0.1", 0).await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let dial = |_| tokio::net::TcpStream::connect(address);
        // a dial that finds no room is repeated by the kernel only after a second, and nobody accepts here
        let all = futures_util::future::join_all((0..DIALS).map(dial));
        let dials = tokio::time::timeout(Duration::from_secs(20), all).await.expect("all wait");
        assert!(dials.iter().all(Result::is_ok));
    }

    #[tokio::test]
    async fn of_what_is_in_the_way_only_a_socket_without_a_listener_goes() {
        let dir = std::env::temp_dir().join(format!("headrace-net-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let path = dir.join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        let error = remove_left_over(&path).await.expect_err("somebody listens");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists());
        drop(listener);
        remove_left_over(&path).await.expect("nobody listens");
        assert!(!path.exists());
        std::fs::write(&path, "keys").expect("a file");
        let error = remove_left_over(&path).await.expect_err("it is a file");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&path).expect("it is there"), b"keys");
        std::fs::remove_dir_all(&dir).expect("it is ours");
    }

    #[tokio::test]
    async fn an_address_that_is_taken_or_none_is_refused() {
        let listener = listen("localhost", 0).await.expect("a free port");
        let taken = listener.local_addr().expect("it is bound");
        let error = listen(&taken.ip().to_string(), taken.port()).await.expect_err("it is taken");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(listen("no.such.host.invalid", 0).await.is_err());
    }
}
