//! How etcd is entered: what the variables HEADRACE_ETCD_... say, for routers and workers alike.

use std::fs;
use std::path::PathBuf;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use super::super::{ConfigError, Secret, TlsFiles, environment};

const CA: &str = "HEADRACE_ETCD_CA";
const CERT: &str = "HEADRACE_ETCD_CERT";
const KEY: &str = "HEADRACE_ETCD_KEY";
const USER: &str = "HEADRACE_ETCD_USER";
const PASSWORD: &str = "HEADRACE_ETCD_PASSWORD";

/// What the variables say.
#[derive(Debug, Clone, Default)]
pub struct EtcdVariables {
    /// File with the certificates that vouch for etcd; without, nothing is encrypted.
    pub ca: Option<PathBuf>,
    /// File with this process's own certificate.
    pub cert: Option<PathBuf>,
    /// File with the key of that.
    pub key: Option<PathBuf>,
    /// User as etcd knows this process.
    pub user: Option<String>,
    /// The user's password.
    pub password: Option<Secret>,
}

/// How etcd is entered, checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EtcdAccess {
    pub(crate) tls: Option<EtcdTls>,
    pub(crate) login: Option<EtcdLogin>,
}

/// Files for encrypted connections, all PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EtcdTls {
    pub(crate) ca: PathBuf,
    /// Where etcd wants to know who comes.
    pub(crate) identity: Option<TlsFiles>,
}

/// User and password that a connection logs in with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EtcdLogin {
    pub(crate) user: String,
    pub(crate) password: Secret,
}

impl EtcdVariables {
    /// As they are now.
    #[must_use]
    pub fn from_environment() -> Self {
        let path = |name| environment::one(name).map(PathBuf::from);
        Self {
            ca: path(CA),
            cert: path(CERT),
            key: path(KEY),
            user: environment::one(USER),
            password: environment::one(PASSWORD).map(Secret),
        }
    }
}

impl TryFrom<EtcdVariables> for EtcdAccess {
    type Error = ConfigError;

    fn try_from(variables: EtcdVariables) -> Result<Self, ConfigError> {
        let EtcdVariables { ca, cert, key, user, password } = variables;
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
            (None, None) => None,
            (Some(_), None) => return Err(missing(KEY, CERT)),
            (None, Some(_)) => return Err(missing(CERT, KEY)),
        };
        let login = match (user, password) {
            (Some(user), Some(password)) => Some(EtcdLogin { user, password }),
            (None, None) => None,
            (Some(_), None) => return Err(missing(PASSWORD, USER)),
            (None, Some(_)) => return Err(missing(USER, PASSWORD)),
        };
        let tls = match (ca, identity) {
            (Some(ca), identity) => Some(EtcdTls { ca, identity }),
            (None, None) => None,
            (None, Some(_)) => return Err(missing(CA, CERT)),
        };
        if let Some(tls) = &tls {
            tls.check()?;
        }
        Ok(Self { tls, login })
    }
}

impl EtcdTls {
    /// The files are read again for each connection; what is wrong from the start is said at the start.
    fn check(&self) -> Result<(), ConfigError> {
        let read = |variable, path: &PathBuf| {
            let problem = |error| format!("cannot read {}: {error}", path.display());
            fs::read(path).map_err(|error| wrong(variable, problem(error), "name a PEM file"))
        };
        let ca = read(CA, &self.ca)?;
        if CertificateDer::pem_slice_iter(&ca).next().is_none_or(|cert| cert.is_err()) {
            let problem = format!("{} holds no certificate", self.ca.display());
            return Err(wrong(CA, problem, "name a PEM file with the certificates of etcd's CA"));
        }
        if let Some(own) = &self.identity {
            read(CERT, &own.cert)?;
            read(KEY, &own.key)?;
        }
        Ok(())
    }
}

fn missing(variable: &'static str, given: &str) -> ConfigError {
    wrong(variable, "is missing".into(), &format!("{given} is of no use without it"))
}

fn wrong(variable: &'static str, problem: String, remedy: &str) -> ConfigError {
    ConfigError::Variable { variable, problem, remedy: remedy.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn data(name: &str) -> Option<PathBuf> {
        Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name))
    }

    fn refused(change: impl FnOnce(&mut EtcdVariables)) -> String {
        let mut variables = EtcdVariables {
            ca: data("localhost.crt"),
            cert: data("localhost.crt"),
            key: data("localhost.key"),
            user: Some("headrace".into()),
            password: Some(Secret("of etcd".into())),
        };
        EtcdAccess::try_from(variables.clone()).unwrap();
        change(&mut variables);
        EtcdAccess::try_from(variables).unwrap_err().to_string()
    }

    #[test]
    fn half_of_what_is_needed_is_refused_by_name() {
        assert!(refused(|v| v.ca = None).starts_with("HEADRACE_ETCD_CA: is missing"));
        assert!(refused(|v| v.cert = None).starts_with("HEADRACE_ETCD_CERT: is missing"));
        assert!(refused(|v| v.key = None).starts_with("HEADRACE_ETCD_KEY: is missing"));
        assert!(refused(|v| v.user = None).starts_with("HEADRACE_ETCD_USER: is missing"));
        assert!(refused(|v| v.password = None).starts_with("HEADRACE_ETCD_PASSWORD: is missing"));
        assert!(EtcdAccess::try_from(EtcdVariables::default()).is_ok(), "nothing is needed");
    }

    #[test]
    fn files_that_cannot_be_used_are_refused_at_the_start() {
        let error = refused(|v| v.ca = data("localhost.key"));
        assert!(error.starts_with("HEADRACE_ETCD_CA: ") && error.contains("holds no certificate"));
        assert!(refused(|v| v.ca = data("no.crt")).starts_with("HEADRACE_ETCD_CA: cannot read"));
        assert!(
            refused(|v| v.cert = data("no.crt")).starts_with("HEADRACE_ETCD_CERT: cannot read")
        );
        assert!(refused(|v| v.key = data("no.key")).starts_with("HEADRACE_ETCD_KEY: cannot read"));
    }

    #[test]
    fn no_debug_text_holds_the_password() {
        let password = Some(Secret("hunter2".into()));
        let variables = EtcdVariables { user: Some("u".into()), password, ..Default::default() };
        assert!(!format!("{variables:?}").contains("hunter2"));
        let access = EtcdAccess::try_from(variables).unwrap();
        assert!(!format!("{access:?}").contains("hunter2"));
    }
}
