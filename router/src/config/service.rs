//! What a service manager says in the environment, as systemd does: sockets that it passes (LISTEN_FDS), where it is told of
//! this process's state (NOTIFY_SOCKET), and how often it wants a sign of life (WATCHDOG_USEC).

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{SocketType, sockopt};

use super::{ConfigError, RouterArgs, WorkerListen, environment};

/// The first descriptor that is passed.
const FIRST: RawFd = 3;
/// Sockets that may be passed. A guess: clients, workers and a few of operators.
const MOST: i32 = 16;

const FDS: &str = "LISTEN_FDS";
const NAMES: &str = "LISTEN_FDNAMES";

/// What the variables say.
#[derive(Debug, Clone, Default)]
pub struct ServiceVariables {
    /// LISTEN_PID: the process that the sockets are for.
    pub listen_pid: Option<String>,
    /// LISTEN_FDS: how many there are, from descriptor 3 on.
    pub listen_fds: Option<String>,
    /// LISTEN_FDNAMES: their names, with colons between them.
    pub listen_names: Option<String>,
    /// NOTIFY_SOCKET: path of a socket, or @ and an abstract name.
    pub notify_socket: Option<String>,
    /// WATCHDOG_PID: the process that is to give signs of life; any, where it is left out.
    pub watchdog_pid: Option<String>,
    /// WATCHDOG_USEC: microseconds within which each has to come.
    pub watchdog_usec: Option<String>,
}

impl ServiceVariables {
    /// As they are now.
    #[must_use]
    pub fn from_environment() -> Self {
        Self {
            listen_pid: environment::one("LISTEN_PID"),
            listen_fds: environment::one(FDS),
            listen_names: environment::one(NAMES),
            notify_socket: environment::one("NOTIFY_SOCKET"),
            watchdog_pid: environment::one("WATCHDOG_PID"),
            watchdog_usec: environment::one("WATCHDOG_USEC"),
        }
    }
}

/// What the service manager says, checked.
#[derive(Debug, Clone, Default)]
pub struct ServiceConfig {
    passed: Vec<PassedSocket>,
    /// Where it is told of this process's state.
    pub notify: Option<NotifyAddress>,
    /// It wants a sign of life within this time, each time.
    pub watchdog: Option<Duration>,
}

/// A socket at which somebody else listens already.
#[derive(Debug, Clone)]
pub struct PassedSocket {
    role: SocketRole,
    address: WorkerListen,
    socket: Arc<OwnedFd>,
}

/// Who dials there. The names are those of `FileDescriptorName=` in a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketRole {
    /// `http`: clients.
    Clients,
    /// `workers`.
    Workers,
    /// `admin`: operators.
    Operators,
}

impl SocketRole {
    fn of(name: &str) -> Option<Self> {
        match name {
            "http" => Some(Self::Clients),
            "workers" => Some(Self::Workers),
            "admin" => Some(Self::Operators),
            _ => None,
        }
    }
}

/// Where a service manager listens for what a process says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotifyAddress {
    /// A socket in the file system.
    Path(PathBuf),
    /// A name of Linux' own, without the @.
    Abstract(Vec<u8>),
}

fn variable(variable: &'static str, problem: impl Into<String>, remedy: &str) -> ConfigError {
    ConfigError::Variable { variable, problem: problem.into(), remedy: remedy.into() }
}

impl ServiceConfig {
    /// `pid`: of this process.
    ///
    /// # Errors
    /// A variable, or a socket that is passed, cannot be used.
    pub(super) fn check(said: &ServiceVariables, pid: u32) -> Result<Self, ConfigError> {
        let is_ours = |of: &Option<String>| of.as_ref().is_some_and(|of| *of == pid.to_string());
        // the variables are inherited by processes that they are not for
        let passed = if is_ours(&said.listen_pid) { passed(said)? } else { Vec::new() };
        let watched = said.watchdog_pid.is_none() || is_ours(&said.watchdog_pid);
        let watchdog = said.watchdog_usec.as_deref().filter(|_| watched);
        let watchdog = watchdog.map(|text| {
            let us = text.parse().ok().filter(|us| *us > 0).ok_or_else(|| {
                let remedy = "it is a number of microseconds above 0";
                variable("WATCHDOG_USEC", format!("is {text:?}"), remedy)
            });
            us.map(Duration::from_micros)
        });
        let notify = said.notify_socket.as_deref().map(notify_address).transpose()?;
        Ok(Self { passed, notify, watchdog: watchdog.transpose()? })
    }

    /// The flags as they would be for the sockets that are passed: who may come in is checked by where others reach them.
    pub(super) fn place(&self, args: &mut RouterArgs) -> Result<(), ConfigError> {
        for socket in &self.passed {
            match (socket.role, &socket.address) {
                (SocketRole::Clients, WorkerListen::Tcp(text)) => {
                    let address: SocketAddr = text.parse().expect("it was written so");
                    args.host = address.ip().to_string();
                    args.port = address.port();
                }
                (SocketRole::Clients, WorkerListen::Unix(_)) => {
                    let problem = "the socket with the name http is a Unix socket";
                    return Err(variable(FDS, problem, "pass one of TCP (ListenStream=PORT)"));
                }
                (SocketRole::Workers, address) => args.worker_listen = address.to_string(),
                (SocketRole::Operators, address) => {
                    if let WorkerListen::Unix(path) = address {
                        check_private(path)?;
                    }
                    args.admin_listen.push(address.to_string());
                }
            }
        }
        Ok(())
    }

    /// True if the socket of the clients is not this process's own: another one may listen at it, before, beside or after.
    #[must_use]
    pub fn shares_clients(&self) -> bool {
        self.passed.iter().any(|socket| socket.role == SocketRole::Clients)
    }

    /// The socket for `role` at this address, if it was passed: a descriptor of its own.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub(crate) fn take(
        &self,
        role: SocketRole,
        address: &WorkerListen,
    ) -> io::Result<Option<OwnedFd>> {
        let found = self.passed.iter().find(|one| one.role == role && one.address == *address);
        found.map(|one| one.socket.try_clone()).transpose()
    }
}

fn notify_address(text: &str) -> Result<NotifyAddress, ConfigError> {
    if text.starts_with('/') {
        return Ok(NotifyAddress::Path(text.into()));
    }
    match text.strip_prefix('@') {
        Some(name) if !name.is_empty() && cfg!(target_os = "linux") => {
            Ok(NotifyAddress::Abstract(name.as_bytes().to_vec()))
        }
        _ => {
            let remedy = "it is the path of a socket, or on Linux @ and a name";
            Err(variable("NOTIFY_SOCKET", format!("is {text:?}"), remedy))
        }
    }
}

/// All sockets with their names.
fn passed(said: &ServiceVariables) -> Result<Vec<PassedSocket>, ConfigError> {
    let Some(count) = said.listen_fds.as_deref() else { return Ok(Vec::new()) };
    let Some(count) = count.parse().ok().filter(|count| (0..=MOST).contains(count)) else {
        return Err(variable(FDS, format!("is {count:?}"), &format!("it may be 0 to {MOST}")));
    };
    let names: Vec<&str> =
        said.listen_names.as_deref().map_or_else(Vec::new, |names| names.split(':').collect());
    if names.len() != usize::try_from(count).expect("it is not negative") {
        let problem = format!("has {} names for {count} sockets", names.len());
        return Err(variable(
            NAMES,
            problem,
            "name each socket: FileDescriptorName=http, workers or admin",
        ));
    }
    let mut found: Vec<PassedSocket> = Vec::new();
    for (fd, name) in (FIRST..).zip(names) {
        let Some(role) = SocketRole::of(name) else {
            let remedy = "the names are http, workers and admin";
            return Err(variable(NAMES, format!("has the name {name:?}"), remedy));
        };
        if role != SocketRole::Operators && found.iter().any(|other| other.role == role) {
            let remedy = "pass one; a socket of IPv6 takes IPv4, too (BindIPv6Only=both)";
            return Err(variable(NAMES, format!("has the name {name} twice"), remedy));
        }
        let unusable = |problem: String| {
            let problem = format!("descriptor {fd} ({name}) {problem}");
            variable(FDS, problem, "pass stream sockets that listen")
        };
        let socket = descriptor(fd).map_err(|error| unusable(error.to_string()))?;
        let address = address_of(&socket).map_err(unusable)?;
        found.push(PassedSocket { role, address, socket: Arc::new(socket) });
    }
    Ok(found)
}

/// A descriptor of our own for the same socket. The one that was passed stays open, and is closed on `exec`: processes that
/// this one starts have no part in it.
#[expect(unsafe_code, reason = "a number that the environment names is no descriptor yet")]
fn descriptor(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: used in this function only, and nothing here closes it; for a number without a file the kernel gives EBADF.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_setfd(passed, rustix::io::FdFlags::CLOEXEC)?;
    Ok(rustix::io::fcntl_dupfd_cloexec(passed, FIRST)?)
}

/// Where it listens. Errors are phrases.
fn address_of(socket: &OwnedFd) -> Result<WorkerListen, String> {
    let kind = sockopt::socket_type(socket.as_fd()).map_err(|_| "is no socket".to_owned())?;
    let listens = sockopt::socket_acceptconn(socket.as_fd()).unwrap_or(false);
    if kind != SocketType::STREAM || !listens {
        return Err("does not listen for streams".to_owned());
    }
    let own = || socket.try_clone().map_err(|error| error.to_string());
    if let Ok(address) = TcpListener::from(own()?).local_addr() {
        return Ok(WorkerListen::Tcp(address.to_string()));
    }
    let address = UnixListener::from(own()?).local_addr().map_err(|error| error.to_string())?;
    let path = address.as_pathname().ok_or("is a Unix socket without a file")?;
    Ok(WorkerListen::Unix(path.to_owned()))
}

/// A Unix socket of operators asks for no key.
fn check_private(path: &std::path::Path) -> Result<(), ConfigError> {
    let mode = std::fs::metadata(path).map(|file| file.mode() & 0o777);
    let shown = path.display();
    match mode {
        Ok(mode) if mode & 0o077 == 0 => Ok(()),
        Ok(mode) => {
            let problem =
                format!("others may open {shown} (mode {mode:04o}), which asks for no key");
            Err(variable(FDS, problem, "set SocketMode=0600"))
        }
        Err(error) => Err(variable(
            FDS,
            format!("cannot look at {shown}: {error}"),
            "keep the file of the socket",
        )),
    }
}

#[cfg(test)]
mod tests;
