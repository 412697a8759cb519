//! What listeners and connections share: who is at the other end, a socket with a queue for a burst of dials, a file for a Unix
//! socket, and which failed accepts call for a pause. `lobby` bounds who has not introduced itself, `tls` is read from files.

pub(crate) mod lobby;
pub(crate) mod tls;

use std::fs::Permissions;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixSocket, UnixStream, lookup_host};

/// Connections that the kernel keeps until they are accepted: a burst of dials, such as a thousand workers that have lost
/// their router, loses none. The kernel allows no more than `net.core.somaxconn`, 4,096 unless somebody changed it.
pub(crate) const BACKLOG: u32 = 4_096;
/// Says so where the kernel keeps fewer, so that a burst of dials is slow for a reason that can be looked up.
pub(crate) fn check_backlog() {
    let Some(kept) = kernel_backlog(SOMAXCONN) else { return };
    if kept < BACKLOG {
        tracing::warn!(
            kept,
            wanted = BACKLOG,
            "of a burst of dials the kernel keeps few, and the others try again after a second: raise net.core.somaxconn"
        );
    }
}

/// The most that any listener keeps; only Linux has this file.
const SOMAXCONN: &str = "/proc/sys/net/core/somaxconn";

fn kernel_backlog(file: impl AsRef<Path>) -> Option<u32> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// What lacks comes back when a connection ends; until then, accepting again and again would only take the processor.
const PAUSE: Duration = Duration::from_millis(10);

/// Which connection a request came on; an extension of each request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// The client's address, or that of the proxy before it.
    pub(crate) address: IpAddr,
    /// Number of the connection.
    pub(crate) connection: u64,
}

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

/// The file of a Unix socket, removed when this drops unless it is lent.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Somebody else listens there, too, and takes it away.
    is_lent: bool,
}

impl SocketFile {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.is_lent {
            let _ = std::fs::remove_file(&self.path); // who took it away already is no concern of ours
        }
    }
}

/// A listener of TCP that was passed to this process.
///
/// # Errors
/// It cannot be waited for.
pub(crate) fn passed(socket: OwnedFd) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// A Unix socket that was passed to this process, with its file, which stays.
///
/// # Errors
/// It cannot be waited for.
pub(crate) fn passed_unix(socket: OwnedFd, path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    let file = SocketFile { path: path.to_owned(), is_lent: true };
    Ok((UnixListener::from_std(listener)?, file))
}

/// Binds a Unix socket; with `mode`, nobody else can open it from its first moment on. A socket without a listener behind it
/// is left over from a router that was killed, and goes. Any other file stays.
///
/// # Errors
/// The path is taken, or cannot be made.
pub(crate) async fn listen_unix(
    path: &Path,
    mode: Option<u32>,
) -> io::Result<(UnixListener, SocketFile)> {
    let bind = || -> io::Result<_> {
        let socket = UnixSocket::new_stream()?;
        socket.bind(path)?;
        let file = SocketFile { path: path.to_owned(), is_lent: false };
        if let Some(mode) = mode {
            std::fs::set_permissions(path, Permissions::from_mode(mode))?; // before `listen` nobody can connect
        }
        Ok((socket.listen(BACKLOG)?, file))
    };
    match bind() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            // of a link itself, not of what it points to: a link is none of ours
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                let problem =
                    "a file that is no socket has this name; move it away, or name another path";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
            }
            match UnixStream::connect(path).await {
                Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path)?;
                    bind()
                }
                _ => Err(error),
            }
        }
        bound => bound,
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
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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
        let files = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files })
            .expect("as far as it goes");
        // as many as the kernel keeps and this process may open, up to 16 times what the standard library's listeners keep
        let files =
            files.maximum.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let kept = kernel_backlog(SOMAXCONN).map_or(128, |kept| kept as usize);
        let dials = 2_048.min(kept).min(files / 2);
        let listener = listen("127.0.0.1", 0).await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let dial = |_| tokio::net::TcpStream::connect(address);
        // a dial that finds no room is repeated by the kernel only after a second, and nobody accepts here
        let all = futures_util::future::join_all((0..dials).map(dial));
        let dials = tokio::time::timeout(Duration::from_secs(20), all).await.expect("all wait");
        assert!(dials.iter().all(Result::is_ok));
    }

    #[test]
    fn what_the_kernel_keeps_is_a_number_or_not_known() {
        let file = std::env::temp_dir().join(format!("headrace-somaxconn-{}", std::process::id()));
        for (text, kept) in
            [("128\n", Some(128)), ("4096", Some(4_096)), ("", None), ("-1", None), ("many", None)]
        {
            std::fs::write(&file, text).unwrap();
            assert_eq!(kernel_backlog(&file), kept, "{text:?}");
        }
        std::fs::remove_file(&file).unwrap();
        assert_eq!(kernel_backlog(&file), None);
    }

    #[tokio::test]
    async fn a_socket_that_is_left_over_goes_and_any_other_file_stays() {
        let folder = std::env::temp_dir().join(format!("headrace-net-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.sock");
        std::fs::write(&path, "precious").unwrap();
        let link = folder.join("b.sock");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for taken in [&path, &link, &folder] {
            let error = listen_unix(taken, None).await.expect_err("it is no socket");
            assert!(error.to_string().contains("no socket"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        assert!(link.is_symlink());
        std::fs::remove_file(&path).unwrap();

        let (listener, file) = listen_unix(&path, Some(0o600)).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = listen_unix(&path, None).await.expect_err("somebody listens there");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        std::mem::forget(file); // as after kill -9
        drop(listener);
        let (_listener, file) = listen_unix(&path, None).await.expect("nobody listens there");
        assert_eq!(file.path(), path);
        drop(file);
        assert!(!path.exists());
        std::fs::remove_dir_all(&folder).unwrap();
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
