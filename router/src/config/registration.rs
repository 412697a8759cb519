//! How workers are to find this router, where they were not told.

mod etcd;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::{ConfigError, RouterArgs, WorkerListen, flag};
pub(crate) use etcd::EtcdTls;
pub use etcd::{EtcdAccess, EtcdVariables};

/// An entry in etcd that lives as long as this router.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registration {
    /// `HOST:PORT` of the members of one etcd; any of them will do.
    pub endpoints: Vec<String>,
    /// Keys are `PREFIX/ROUTER`.
    pub prefix: String,
    /// What workers dial; `None` is the address on which this router listens for them.
    pub advertise: Option<String>,
    /// Of the lease.
    pub ttl: Duration,
    /// How etcd is entered.
    pub access: EtcdAccess,
}

impl Registration {
    /// `None` without `--register`.
    ///
    /// # Errors
    /// Names the flag that cannot be right.
    pub(super) fn check(
        args: &RouterArgs,
        listen: &WorkerListen,
    ) -> Result<Option<Self>, ConfigError> {
        let Some(text) = &args.register else {
            if args.advertise.is_some() {
                let remedy = "say with --register where it is to be told";
                return Err(flag("advertise", "is told to nobody".into(), remedy));
            }
            return Ok(None);
        };
        let wrong =
            |problem: String| flag("register", problem, "write etcd:HOST:PORT[,HOST:PORT]/PREFIX");
        let (endpoints, prefix) = text
            .strip_prefix("etcd:")
            .and_then(|rest| rest.split_once('/'))
            .ok_or_else(|| wrong(format!("{text:?} names no etcd")))?;
        let prefix = prefix.trim_end_matches('/');
        if prefix.is_empty() {
            return Err(wrong(format!("{text:?} names no prefix")));
        }
        let endpoints: Vec<String> = endpoints.split(',').map(|one| one.trim().into()).collect();
        if let Some(endpoint) = endpoints.iter().find(|endpoint| !dialable(endpoint)) {
            return Err(wrong(format!("{endpoint:?} is no HOST:PORT")));
        }
        let reach = args.advertise.clone().or(match listen {
            WorkerListen::Tcp(address) => Some(address.clone()),
            WorkerListen::Unix(_) => None,
        });
        // a listener's port of 0 is known once it is bound
        let free = args.advertise.is_none() && reach.as_ref().is_some_and(|r| r.ends_with(":0"));
        let host = reach.as_ref().and_then(|reach| reach.rsplit_once(':')).map(|(host, _)| host);
        if host.is_none_or(unspecified) || !(free || reach.as_deref().is_some_and(dialable)) {
            let problem = match &args.advertise {
                Some(text) => format!("{text:?} is no address to dial"),
                None => format!("is missing: workers cannot dial {listen}"),
            };
            return Err(flag("advertise", problem, "write the HOST:PORT at which they reach it"));
        }
        if !(2..=3_600).contains(&args.register_ttl_s) {
            let problem = format!("is {}", args.register_ttl_s);
            return Err(flag("register-ttl-s", problem, "2 to 3600 seconds"));
        }
        Ok(Some(Self {
            endpoints,
            prefix: prefix.to_owned(),
            advertise: args.advertise.clone(),
            ttl: Duration::from_secs(args.register_ttl_s.into()),
            access: EtcdAccess::try_from(args.etcd.clone())?,
        }))
    }
}

/// `HOST:PORT` with a port other than 0; IPv6 in brackets.
fn dialable(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let host_ok = !host.is_empty() && (!host.contains(':') || text.parse::<SocketAddr>().is_ok());
    host_ok && port.parse::<u16>().is_ok_and(|port| port != 0)
}

fn unspecified(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn config(change: impl FnOnce(&mut RouterArgs)) -> Result<Config, ConfigError> {
        let secret = Some("of these tests".into()); // as other machines reach most of these addresses
        let mut args = RouterArgs { secret, ..RouterArgs::default() };
        change(&mut args);
        Config::try_from(args)
    }

    #[test]
    fn endpoints_and_prefix_are_read() {
        let config = config(|args| {
            args.register = Some("etcd:e1:2379,[::1]:2379/head/race/".into());
            args.advertise = Some("10.0.0.1:8001".into());
        });
        let registration = config.unwrap().fleet.registration.unwrap();
        assert_eq!(registration.endpoints, ["e1:2379", "[::1]:2379"]);
        assert_eq!(registration.prefix, "head/race");
        assert_eq!(registration.advertise.as_deref(), Some("10.0.0.1:8001"));
        assert_eq!(registration.ttl, Duration::from_secs(10));
    }

    #[test]
    fn an_address_that_can_be_dialled_need_not_be_advertised() {
        for listen in ["10.0.0.1:8001", "10.0.0.1:0", "router:8001", "[fd00::1]:8001"] {
            let config = config(|args| {
                args.register = Some("etcd:e:2379/p".into());
                args.worker_listen = listen.into();
            });
            assert_eq!(config.unwrap().fleet.registration.unwrap().advertise, None, "{listen}");
        }
        for listen in ["0.0.0.0:8001", "[::]:8001", "0.0.0.0:0", "unix:/run/router"] {
            let config = config(|args| {
                args.register = Some("etcd:e:2379/p".into());
                args.worker_listen = listen.into();
            });
            let error = config.unwrap_err().to_string();
            assert!(error.starts_with("--advertise: is missing"), "{listen}: {error}");
        }
    }

    #[test]
    fn what_is_no_registration_is_refused_by_flag() {
        for text in ["", "e:2379/p", "etcd:/p", "etcd:e:2379", "etcd:e:2379/", "etcd:e/p"] {
            let error = config(|args| args.register = Some(text.into())).unwrap_err().to_string();
            assert!(error.starts_with("--register: "), "{text}: {error}");
        }
        for text in ["e:2379,x", "e:0", "::1:2379", "e:2379,"] {
            let text = format!("etcd:{text}/p");
            assert!(config(|args| args.register = Some(text)).is_err());
        }
        for text in ["host", "host:0", ":1", "0.0.0.0:8001", "[::]:8001", "::1:8001"] {
            let error = config(|args| {
                args.register = Some("etcd:e:2379/p".into());
                args.advertise = Some(text.into());
            });
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with("--advertise: "), "{text}: {error}");
        }
        assert!(config(|args| args.advertise = Some("h:1".into())).is_err(), "to nobody");
        for ttl in [0, 1, 3_601] {
            let error = config(|args| {
                args.register = Some("etcd:e:2379/p".into());
                args.register_ttl_s = ttl;
            });
            assert!(error.unwrap_err().to_string().starts_with("--register-ttl-s: "));
        }
    }
}
