//! TLS of a listener: its certificate and key, and whose certificates those who dial must have. The files are read again
//! without a restart; what cannot be used changes nothing.

use std::error::Error;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, RwLock};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

use crate::config::{Reloaded, TlsListen};

/// Longest file of certificates or of a key: hundreds of authorities fit.
const LONGEST_FILE: u64 = 1 << 20;

/// A file that cannot be used for TLS.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {path} for TLS: {source}")]
pub struct TlsError {
    path: String,
    source: Box<dyn Error + Send + Sync>,
}

impl TlsError {
    fn of(path: &Path, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { path: path.display().to_string(), source: source.into() }
    }
}

/// In words that say whose fault it is: that of the file and not of its form.
#[derive(Debug, thiserror::Error)]
#[error("it holds no private key")]
struct NoPrivateKey(#[source] pem::Error);

#[derive(Debug, thiserror::Error)]
#[error("it holds no certificate")]
struct NoCertificate;

#[derive(Debug, thiserror::Error)]
#[error("it is longer than {LONGEST_FILE} bytes")]
struct TooLong;

/// What a listener shows and asks for, as its files say now.
#[derive(Debug)]
pub(crate) struct ServerTls {
    files: TlsListen,
    protocols: Vec<Vec<u8>>,
    current: RwLock<Arc<ServerConfig>>,
    /// Digest of what was read last, whether it could be used or not.
    seen: Mutex<blake3::Hash>,
}

impl ServerTls {
    /// Reads the files. `protocols` are those of ALPN, best first.
    ///
    /// # Errors
    /// One cannot be read or holds something else, or the key does not belong to the certificate.
    pub(crate) fn load(files: &TlsListen, protocols: &[&str]) -> Result<Arc<Self>, TlsError> {
        let protocols: Vec<Vec<u8>> =
            protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let texts = Texts::read(files)?;
        let current = RwLock::new(texts.config(files, &protocols)?);
        let seen = Mutex::new(texts.digest());
        Ok(Arc::new(Self { files: files.clone(), protocols, current, seen }))
    }

    /// For the next connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.current.read().expect("no holder panics")))
    }

    /// Reads the files again. What is refused is refused once, until it changes or somebody insists.
    pub(crate) fn reload(&self, insist: bool) -> Reloaded {
        let texts = Texts::read(&self.files);
        let digest = match &texts {
            Ok(texts) => texts.digest(),
            Err(error) => blake3::hash(error.to_string().as_bytes()),
        };
        let mut seen = self.seen.lock().expect("no holder panics");
        if *seen == digest && !insist {
            return Reloaded::Same;
        }
        *seen = digest;
        match texts.and_then(|texts| texts.config(&self.files, &self.protocols)) {
            Ok(config) => {
                *self.current.write().expect("no holder panics") = config;
                Reloaded::New
            }
            Err(error) => Reloaded::Refused(error.to_string()),
        }
    }
}

/// A warning where every user of the machine can read the key.
pub(crate) fn warning(files: &TlsListen) -> Option<String> {
    let key = &files.identity.key;
    let mode = std::fs::metadata(key).ok()?.permissions().mode();
    (mode & 0o004 != 0).then(|| {
        let key = key.display();
        format!("every user of this machine can read the private key {key}; chmod o-r keeps it to its owner and group")
    })
}

/// What the files hold.
struct Texts {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Texts {
    fn read(files: &TlsListen) -> Result<Self, TlsError> {
        let text = |path: &Path| bounded(path).map_err(|error| TlsError::of(path, error));
        let client_ca = files.client_ca.as_deref().map(text).transpose()?;
        Ok(Self { cert: text(&files.identity.cert)?, key: text(&files.identity.key)?, client_ca })
    }

    fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for text in [&self.cert, &self.key, self.client_ca.as_ref().unwrap_or(&Vec::new())] {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text);
        }
        hasher.finalize()
    }

    fn config(
        &self,
        files: &TlsListen,
        protocols: &[Vec<u8>],
    ) -> Result<Arc<ServerConfig>, TlsError> {
        let identity = &files.identity;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| {
            if matches!(error, pem::Error::NoItemsFound) {
                return TlsError::of(&identity.key, NoPrivateKey(error));
            }
            TlsError::of(&identity.key, error)
        })?;
        let chain = certificates(&self.cert, &identity.cert)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions() // 1.2 and 1.3
            .map_err(|error| TlsError::of(&identity.cert, error))?;
        let builder = match (&files.client_ca, &self.client_ca) {
            (Some(path), Some(text)) => {
                builder.with_client_cert_verifier(verifier(text, path, provider)?)
            }
            _ => builder.with_no_client_auth(),
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| TlsError::of(&identity.cert, error))?;
        config.alpn_protocols = protocols.to_vec();
        Ok(Arc::new(config))
    }
}

/// Refuses who has no certificate of these authorities.
fn verifier(
    text: &[u8],
    path: &Path,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(text, path)? {
        roots.add(certificate).map_err(|error| TlsError::of(path, error))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(|error| TlsError::of(path, error))
}

fn certificates(text: &[u8], path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| TlsError::of(path, error))?;
    if found.is_empty() {
        return Err(TlsError::of(path, NoCertificate));
    }
    Ok(found)
}

fn bounded(path: &Path) -> Result<Vec<u8>, Box<dyn Error + Send + Sync>> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(LONGEST_FILE + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LONGEST_FILE {
        return Err(TooLong.into());
    }
    Ok(text)
}

/// Why a handshake failed, in words for metrics.
pub(crate) fn failure(error: &io::Error) -> &'static str {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match tls {
        None => "gone",
        Some(rustls::Error::NoCertificatesPresented) => "no_certificate",
        Some(rustls::Error::InvalidCertificate(_)) => "bad_certificate",
        Some(rustls::Error::AlertReceived(_)) => "refused_by_client",
        Some(rustls::Error::PeerIncompatible(_) | rustls::Error::NoApplicationProtocol) => {
            "incompatible"
        }
        Some(_) => "no_tls",
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::config::TlsFiles;

    fn data(name: &str) -> PathBuf {
        [env!("CARGO_MANIFEST_DIR"), "../tests/data", name].iter().collect()
    }

    #[test]
    fn what_has_not_changed_is_neither_loaded_nor_refused_again_unless_somebody_insists() {
        let folder =
            std::env::temp_dir().join(format!("headrace-server-tls-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (cert, key) = (folder.join("crt"), folder.join("key"));
        let copy = |from: &str, to: &Path| std::fs::copy(data(from), to).unwrap();
        copy("localhost.crt", &cert);
        copy("localhost.key", &key);
        let identity = TlsFiles { cert: cert.clone(), key: key.clone() };
        let client_ca = Some(data("tls/ca.crt"));
        let tls = ServerTls::load(&TlsListen { identity, client_ca }, &["h2"]).unwrap();
        assert_eq!((tls.reload(false), tls.reload(true)), (Reloaded::Same, Reloaded::New));
        copy("tls/renewed.crt", &cert);
        let refused =
            |news: Reloaded| matches!(news, Reloaded::Refused(why) if why.contains("crt for TLS"));
        assert!(refused(tls.reload(false)), "the key is another one's");
        assert_eq!(tls.reload(false), Reloaded::Same);
        assert!(refused(tls.reload(true)));
        copy("tls/renewed.key", &key);
        assert_eq!((tls.reload(false), tls.reload(false)), (Reloaded::New, Reloaded::Same));
        std::fs::write(&key, vec![b'x'; LONGEST_FILE as usize + 1]).unwrap();
        assert!(matches!(tls.reload(false), Reloaded::Refused(why) if why.contains("longer than")));
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(tls.reload(false), Reloaded::Refused(_)));
        assert_eq!(tls.reload(false), Reloaded::Same);
    }

    #[test]
    fn a_private_key_that_everybody_can_read_is_warned_about() {
        let key = std::env::temp_dir().join(format!("headrace-tls-key-{}", std::process::id()));
        std::fs::copy(data("localhost.key"), &key).unwrap();
        let identity = TlsFiles { cert: data("localhost.crt"), key: key.clone() };
        let files = TlsListen { identity, client_ca: None };
        for (mode, warns) in [(0o600, false), (0o640, false), (0o644, true)] {
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(warning(&files).is_some(), warns, "{mode:o}");
        }
        std::fs::remove_file(&key).unwrap();
    }
}
