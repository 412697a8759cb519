//! Tells a service manager what this process is at, by systemd's protocol: one datagram for each change.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use rustix::time::{ClockId, clock_gettime};

/// Where the service manager listens; nobody, where there is none. A message that cannot be sent is lost: it is said in the
/// log, and a manager that waits for it says so, too.
#[derive(Debug, Default)]
pub struct Notifier(Option<Open>);

#[derive(Debug)]
struct Open {
    socket: UnixDatagram,
    address: Address,
}

/// The address of its socket.
#[derive(Debug)]
pub enum Address {
    /// A path.
    Path(PathBuf),
    /// A name of Linux' own.
    Abstract(Vec<u8>),
}

impl Notifier {
    /// Tells the one at `address`, if there is one.
    ///
    /// # Errors
    /// There is no socket to be had.
    pub fn new(address: Option<Address>) -> io::Result<Self> {
        let open = |address| -> io::Result<Open> {
            let socket = UnixDatagram::unbound()?;
            socket.set_nonblocking(true)?; // a manager that does not read holds up nobody
            Ok(Open { socket, address })
        };
        Ok(Self(address.map(open).transpose()?))
    }

    /// True if anybody listens.
    #[must_use]
    pub fn is_heard(&self) -> bool {
        self.0.is_some()
    }

    /// It serves now, or does again after a reload.
    pub fn ready(&self) {
        self.send("READY=1");
    }

    /// It reads files again.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let us = now.tv_sec.saturating_mul(1_000_000).saturating_add(now.tv_nsec / 1_000);
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={us}"));
    }

    /// It takes nothing new, and ends.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// It lives.
    pub fn watchdog(&self) {
        self.send("WATCHDOG=1");
    }

    /// One line for people.
    pub fn status(&self, line: &str) {
        self.send(&format!("STATUS={}", line.replace('\n', " ")));
    }

    fn send(&self, message: &str) {
        let Some(open) = &self.0 else { return };
        if let Err(error) = open.send(message.as_bytes()) {
            tracing::warn!(%error, message, "the service manager (NOTIFY_SOCKET) was not told");
        }
    }
}

impl Open {
    fn send(&self, message: &[u8]) -> io::Result<usize> {
        match &self.address {
            Address::Path(path) => self.socket.send_to(message, path),
            #[cfg(target_os = "linux")]
            Address::Abstract(name) => {
                use std::os::linux::net::SocketAddrExt as _;
                let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
                self.socket.send_to_addr(message, &address)
            }
            #[cfg(not(target_os = "linux"))]
            Address::Abstract(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    fn says_everything(manager: &UnixDatagram, address: Address) {
        let notifier = Notifier::new(Some(address)).unwrap();
        assert!(notifier.is_heard());
        notifier.ready();
        assert_eq!(heard(manager), "READY=1");
        notifier.reloading();
        let reloading = heard(manager);
        let us = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
        assert!(us.parse::<u64>().unwrap() > 0);
        notifier.status("two\nlines");
        assert_eq!(heard(manager), "STATUS=two lines");
        notifier.watchdog();
        assert_eq!(heard(manager), "WATCHDOG=1");
        notifier.stopping();
        assert_eq!(heard(manager), "STOPPING=1");
    }

    #[test]
    fn a_manager_at_a_path_hears_everything_and_one_that_is_gone_holds_up_nobody() {
        let path = std::env::temp_dir().join(format!("headrace-notify-{}", std::process::id()));
        let manager = UnixDatagram::bind(&path).unwrap();
        says_everything(&manager, Address::Path(path.clone()));
        let notifier = Notifier::new(Some(Address::Path(path.clone()))).unwrap();
        for _ in 0..10_000 {
            notifier.watchdog(); // more than its socket holds, and it does not read
        }
        drop(manager);
        std::fs::remove_file(&path).unwrap();
        notifier.ready();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_manager_with_an_abstract_name_hears_everything() {
        use std::os::linux::net::SocketAddrExt as _;
        let name = format!("headrace-notify-{}", std::process::id()).into_bytes();
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
        says_everything(&UnixDatagram::bind_addr(&address).unwrap(), Address::Abstract(name));
    }

    #[test]
    fn without_a_manager_nothing_is_said() {
        let notifier = Notifier::new(None).unwrap();
        assert!(!notifier.is_heard());
        notifier.ready();
    }
}
