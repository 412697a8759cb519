//! TLS of a listener: which files it shows and asks for, and what a second look at files found.

use std::path::PathBuf;

use super::{ConfigError, TlsFiles, flag};

/// What a listener shows, and whose certificates those who dial must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsListen {
    /// Its own certificate and key.
    pub identity: TlsFiles,
    /// File with the authorities (PEM) of which one must have signed the certificate of whoever dials. `None` asks for no
    /// certificate.
    pub client_ca: Option<PathBuf>,
}

/// What came of reading files again while the router serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reloaded {
    /// They are as they were.
    Same,
    /// They have changed, and count from now on.
    New,
    /// They cannot be used, and what they said before counts on. The text says why, and shows no secret.
    Refused(String),
}

/// The flags of one listener, without their dashes.
pub(super) struct TlsFlags {
    pub(super) cert: &'static str,
    pub(super) key: &'static str,
    pub(super) client_ca: &'static str,
}

pub(super) const CLIENTS: TlsFlags =
    TlsFlags { cert: "tls-cert", key: "tls-key", client_ca: "tls-client-ca" };
pub(super) const WORKERS: TlsFlags =
    TlsFlags { cert: "worker-tls-cert", key: "worker-tls-key", client_ca: "worker-tls-client-ca" };

impl TlsFlags {
    /// The values of these flags together.
    ///
    /// # Errors
    /// One of them needs another one.
    pub(super) fn check(
        &self,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        client_ca: Option<PathBuf>,
    ) -> Result<Option<TlsListen>, ConfigError> {
        let missing = |name, text: String| flag(name, "is missing".into(), &text);
        match (cert, key, client_ca) {
            (None, None, None) => Ok(None),
            (Some(cert), Some(key), client_ca) => {
                Ok(Some(TlsListen { identity: TlsFiles { cert, key }, client_ca }))
            }
            (Some(_), None, _) => {
                let text = format!("--{} needs the key that belongs to it", self.cert);
                Err(missing(self.key, text))
            }
            (None, Some(_), _) => {
                let text = format!("--{} needs the certificate that belongs to it", self.key);
                Err(missing(self.cert, text))
            }
            (None, None, Some(_)) => {
                let text = format!(
                    "--{} needs --{} and --{}, for only TLS shows certificates",
                    self.client_ca, self.cert, self.key
                );
                Err(missing(self.cert, text))
            }
        }
    }
}
