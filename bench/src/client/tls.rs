//! TLS to an endpoint, checked with certificates of a file.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::BadInput;

/// How the endpoint is recognised.
pub(super) struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tls({:?})", self.name)
    }
}

impl Tls {
    /// `None` for plain HTTP.
    ///
    /// # Errors
    /// The file is missing, says nothing, or is not needed.
    pub(super) fn of(
        encrypted: bool,
        authority: &str,
        ca: Option<&Path>,
    ) -> Result<Option<Self>, BadInput> {
        let ca = match (encrypted, ca) {
            (false, None) => return Ok(None),
            (false, Some(_)) => {
                return Err(BadInput("--tls-ca: --target must begin with https://".into()));
            }
            (true, None) => {
                let text = "--tls-ca: is missing; name the certificates that the endpoint's is checked with, such as \
                            /etc/ssl/certs/ca-certificates.crt for those of the system";
                return Err(BadInput(text.into()));
            }
            (true, Some(ca)) => ca,
        };
        Self::checked(authority, ca)
            .map(Some)
            .map_err(|error| BadInput(format!("--tls-ca: {error:#}")))
    }

    fn checked(authority: &str, ca: &Path) -> anyhow::Result<Self> {
        let unusable = || format!("cannot use {}", ca.display());
        let mut roots = RootCertStore::empty();
        let found = CertificateDer::pem_file_iter(ca).with_context(unusable)?;
        let found = found.collect::<Result<Vec<_>, _>>().with_context(unusable)?;
        let (added, _) = roots.add_parsable_certificates(found); // a system's list has a few that nobody can read
        anyhow::ensure!(added > 0, "{} holds no certificate", ca.display());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (host, _) = authority.rsplit_once(':').context("the target has no port")?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name: host.try_into()? })
    }

    pub(super) async fn connect(&self, socket: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        self.connector.connect(self.name.clone(), socket).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_in_vain_is_named() {
        let file =
            |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name);
        let of = |encrypted, ca: Option<&str>| {
            Tls::of(encrypted, "localhost:1", ca.map(file).as_deref()).map_err(|error| error.0)
        };
        assert!(of(false, None).unwrap().is_none());
        assert!(of(true, Some("localhost.crt")).unwrap().is_some());
        for (encrypted, ca, part) in [
            (true, None, "is missing"),
            (false, Some("localhost.crt"), "https://"),
            (true, Some("nothing.crt"), "nothing.crt"),
            (true, Some("localhost.key"), "holds no certificate"),
        ] {
            let error = of(encrypted, ca).unwrap_err();
            assert!(error.starts_with("--tls-ca: ") && error.contains(part), "{error}");
        }
        assert!(Tls::of(true, "[::1]:1", Some(&file("localhost.crt"))).is_ok());
    }
}
