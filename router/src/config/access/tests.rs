//! What is open to everybody is refused unless it was meant; keys of files; names of this server.

use std::path::PathBuf;

use super::super::keys::Role;
use super::super::{Config, ConfigError, Keys, RouterArgs, Tenant, first_key};
use super::*;

fn args() -> RouterArgs {
    RouterArgs { secret: None, api_key: Vec::new(), admin_key: Vec::new(), ..RouterArgs::default() }
}

fn check(args: RouterArgs) -> Result<AccessConfig, String> {
    Config::try_from(args).map(|config| config.http.access).map_err(|error| error.to_string())
}

/// Whose key this is.
fn tenant(keys: &Keys, key: &str) -> Option<Tenant> {
    keys.find(key.as_bytes()).and_then(|at| keys.iter().nth(at)).map(|key| key.tenant)
}

/// A file that is removed when this drops.
struct KeyFile(PathBuf);

impl KeyFile {
    fn new(name: &str, text: impl AsRef<[u8]>) -> Self {
        let path =
            std::env::temp_dir().join(format!("headrace-keys-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn who_binds_to_other_machines_says_who_may_come() {
    for host in ["0.0.0.0", "::", "10.0.0.1", "192.168.1.2", "::ffff:10.0.0.1", "fe80::1"] {
        let open = RouterArgs { host: host.into(), ..args() };
        let certified = RouterArgs {
            tls_cert: Some("c".into()),
            tls_key: Some("k".into()),
            tls_client_ca: Some("ca".into()),
            ..open.clone()
        };
        assert!(check(certified.clone()).is_ok());
        assert!(
            check(RouterArgs { tls_client_ca: None, ..certified }).is_err(),
            "TLS alone lets everybody in"
        );
        let error = check(open.clone()).unwrap_err();
        assert!(error.starts_with("--host: ") && error.contains("--api-key-file"), "{error}");
        assert!(error.contains("--allow-anonymous-clients"), "{error}");
        assert!(check(RouterArgs { allow_anonymous_clients: true, ..open.clone() }).is_ok());
        assert!(check(RouterArgs { api_key: vec!["k".into()], ..open }).is_ok());
        let address = if host.contains(':') { format!("[{host}]:1") } else { format!("{host}:1") };
        let open = RouterArgs { worker_listen: address, ..args() };
        let certified = RouterArgs {
            worker_tls_cert: Some("c".into()),
            worker_tls_key: Some("k".into()),
            worker_tls_client_ca: Some("ca".into()),
            ..open.clone()
        };
        assert!(check(certified.clone()).is_ok());
        assert!(check(RouterArgs { worker_tls_client_ca: None, ..certified }).is_err());
        let error = check(open.clone()).unwrap_err();
        assert!(
            error.starts_with("--worker-listen: ") && error.contains("--secret-file"),
            "{error}"
        );
        assert!(error.contains("--allow-anonymous-workers"), "{error}");
        assert!(check(RouterArgs { allow_anonymous_workers: true, ..open.clone() }).is_ok());
        assert!(check(RouterArgs { secret: Some("long enough".into()), ..open.clone() }).is_ok());
        // the one says nothing about the other
        assert!(check(RouterArgs { api_key: vec!["k".into()], ..open.clone() }).is_err());
        assert!(check(RouterArgs { allow_anonymous_clients: true, ..open }).is_err());
    }
    for host in ["127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1"] {
        assert!(check(RouterArgs { host: host.into(), ..args() }).is_ok(), "{host}");
    }
    for worker_listen in ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/x"] {
        assert!(check(RouterArgs { worker_listen: worker_listen.into(), ..args() }).is_ok());
    }
    // names that the system reads as 0.0.0.0 and 10.0.0.1
    for host in ["0", "10.1"] {
        let error = check(RouterArgs { host: host.into(), ..args() }).unwrap_err();
        assert!(error.starts_with("--host: "), "{host}: {error}");
    }
    // nothing has this name: binding fails, and says so
    assert!(check(RouterArgs { host: "no.such.host.invalid".into(), ..args() }).is_ok());
}

#[test]
fn operators_are_not_everybody() {
    let listen = |address: &str| RouterArgs { admin_listen: vec![address.into()], ..args() };
    for address in ["127.0.0.1:0", "[::1]:1", "unix:/run/x"] {
        assert!(check(listen(address)).is_ok(), "{address}");
    }
    let error = check(listen("0.0.0.0:1")).unwrap_err();
    assert!(error.starts_with("--admin-listen: ") && error.contains("--admin-key-file"), "{error}");
    let alone = RouterArgs { admin_listen_only: true, ..RouterArgs::default() };
    let error = check(alone).unwrap_err();
    assert!(error.starts_with("--admin-listen-only: ") && error.contains("unix:PATH"), "{error}");
    let both = RouterArgs { admin_listen_only: true, ..listen("127.0.0.1:0") };
    assert!(check(both).is_ok());
    assert!(check(listen("8000")).unwrap_err().starts_with("--admin-listen: "));
    let keyed = |api_key: &str, admin_key: &str| RouterArgs {
        api_key: vec![api_key.into()],
        admin_key: vec![admin_key.into()],
        ..listen("0.0.0.0:1")
    };
    assert!(check(keyed("a", "b")).is_ok());
    let error = check(keyed("a", "a")).unwrap_err();
    assert!(error.starts_with("--admin-key-file: ") && error.contains("clients"), "{error}");
}

#[test]
fn a_file_has_a_key_a_line_and_perhaps_its_tenant() {
    let text = "# keys\n\n  k1 # old\r\nalice k2\t#new\nalice\tk3\nbob k4\n #k8\ncarol k#9\n";
    let file = KeyFile::new("good", text);
    let config = RouterArgs {
        api_key_file: Some(file.0.clone()),
        api_key: vec!["k5".into(), "bob k6".into()],
        ..args()
    };
    let keys = check(config).unwrap().keys.clients;
    let of = |key: &str| tenant(&keys, key);
    assert!(of("k1").is_some() && of("k5").is_some());
    assert!(of("k2").is_some() && of("k2") == of("k3"), "two keys of one tenant");
    assert!(of("k4").is_some() && of("k4") == of("k6"));
    let apart = ["k1", "k2", "k4", "k5"].map(of);
    assert!((1..4).all(|i| !apart[..i].contains(&apart[i])), "others are apart");
    assert!(of("k#9").is_some(), "a # inside a word begins nothing");
    for wrong in ["", "k", "k7", "alice", "alice k2", "# keys", "k1 ", "#new", "#k8", "k8"] {
        assert_eq!(of(wrong), None, "{wrong:?}");
    }
    let shown = format!("{keys:?} {:?}", of("k1"));
    assert!(!shown.contains("k1"), "{shown}");
}

#[test]
fn the_first_key_of_a_file_is_the_one_that_a_client_sends() {
    for (name, text, key) in [
        ("alone", "# keys\n\nk1\nk2\n", "k1"),
        ("of", "alice k3 # hers\nbob k4\n", "k3"),
        ("with", "k5 rpm=1 name=x\n", "k5"),
        ("both", "alice k6 rpm=1\n", "k6"),
    ] {
        let file = KeyFile::new(name, text);
        assert_eq!(first_key(&file.0).unwrap(), key);
    }
    let none = KeyFile::new("none", "# keys\n");
    assert!(first_key(&none.0).unwrap_err().to_string().contains("holds no key"));
    let digest = format!("alice blake3:{}\n", blake3::hash(b"k").to_hex());
    let digest = KeyFile::new("digest", digest);
    assert!(first_key(&digest.0).unwrap_err().to_string().contains("digest of a key"));
}

#[test]
fn a_tenants_salt_is_its_own_whatever_clients_choose() {
    let config = RouterArgs { api_key: vec!["a".into(), "b".into()], ..args() };
    let keys = check(config).unwrap().keys.clients;
    let (a, b) = (tenant(&keys, "a").unwrap(), tenant(&keys, "b").unwrap());
    assert_ne!(a.salt(b""), b.salt(b""));
    assert_ne!(a.salt(b"x"), b.salt(b"x"));
    assert_ne!(a.salt(b"x"), a.salt(b"y"));
    assert_ne!(a.salt(&b.salt(b"")), b.salt(b""));
    assert_eq!((a.salt(b""), a.salt(b"").len()), (a.salt(b""), 16));
}

#[test]
fn files_that_cannot_be_right_are_refused_without_showing_a_key() {
    let long = format!("sesame{}", "x".repeat(4_096 - 5));
    let longest = KeyFile::new("longest", &long[1..]);
    let config = RouterArgs { api_key_file: Some(longest.0.clone()), ..args() };
    assert!(check(config).unwrap().keys.clients.find(&long.as_bytes()[1..]).is_some());
    let many: String = (0..4_097).map(|i| format!("sesame{i}\n")).collect();
    for (name, text, part) in [
        ("empty", &b""[..], "holds no key"),
        ("comments", b"# sesame\n\n", "holds no key"),
        ("words", b"alice sesame x\n", "line 1: a line has more than two words"),
        ("control", b"good\nses\x01ame\n", "line 2: a key has characters"),
        ("umlaut", "ses\u{e4}me".as_bytes(), "line 1: a key has characters"),
        ("latin", b"ses\xe4me", "cannot read"),
        ("nul", b"ses\0ame", "line 1: a key has characters"),
        ("two", b"a sesame\nb sesame\n", "line 2: a key belongs to two tenants"),
        ("long", long.as_bytes(), "line 1: a key is longer"),
        ("many", many.as_bytes(), "line 4097: there are more than"),
        ("setting", b"ok\nsesame rmp=60\n", "line 2: a word after a key looks like a setting"),
        ("value", b"ok\n\nsesame rpm=x\n", "line 3: rpm= takes"),
        ("names", b"a name=x\nsesame name=x\n", "line 2: a key has the name of another"),
    ] {
        let file = KeyFile::new(name, text);
        let error = check(RouterArgs { api_key_file: Some(file.0.clone()), ..args() }).unwrap_err();
        assert!(error.starts_with("--api-key-file: ") && error.contains(part), "{error}");
        assert!(!error.contains("sesame"), "{error}");
    }
    for path in ["/nonexistent/keys", "/"] {
        let args = RouterArgs { admin_key_file: Some(path.into()), ..args() };
        let error = Config::try_from(args).unwrap_err();
        assert!(matches!(error, ConfigError::File { flag: "admin-key-file", .. }), "{error}");
    }
    let error =
        check(RouterArgs { api_key: vec!["a".into(), String::new()], ..args() }).unwrap_err();
    assert!(error.contains("a key is empty in the variable"), "{error}");
    let error = check(RouterArgs { api_key: vec!["k1 #prod".into()], ..args() }).unwrap_err();
    assert!(error.contains("begins with #") && !error.contains("prod"), "{error}");
}

#[test]
fn a_file_that_everybody_can_read_is_warned_about() {
    use std::os::unix::fs::PermissionsExt as _;
    let file = KeyFile::new("mode", "a long enough secret\n");
    let key = KeyFile::new("mode-key", "key\n");
    for (mode, warnings) in [(0o600, 0), (0o640, 0), (0o644, 2)] {
        for path in [&file.0, &key.0] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let (secret_file, api_key_file) = (Some(file.0.clone()), Some(key.0.clone()));
        let access = check(RouterArgs { secret_file, api_key_file, ..args() }).unwrap();
        assert_eq!(access.warnings.len(), warnings, "{mode:o}: {:?}", access.warnings);
    }
}

#[test]
fn names_and_origins_are_read_as_they_are_written() {
    let hosts = |names: &[&str]| {
        let allowed_hosts = names.iter().map(|&name| name.to_owned()).collect();
        check(RouterArgs { allowed_hosts, host: "LOCALHOST".into(), ..args() })
    };
    let access = hosts(&["Chat.example.com", " router "]).unwrap();
    for name in ["chat.EXAMPLE.com", "router", "localhost"] {
        assert!(access.hosts.contain(name), "{name}");
    }
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    assert!(machine.trim().is_empty() || access.hosts.contain(machine.trim()), "{machine}");
    assert!(!access.hosts.contain("example.com") && !access.hosts.contain(""));
    assert!(hosts(&["*"]).unwrap().hosts.contain("anything"));
    assert!(hosts(&[&"x".repeat(253)]).is_ok(), "as long as the name of a host may be");
    for wrong in ["http://a", "a:80", "a b", "a/b", &"x".repeat(254)] {
        let error = hosts(&[wrong]).unwrap_err();
        assert!(error.starts_with("--allowed-hosts: "), "{error}");
    }
    let origins = |name: &str| {
        check(RouterArgs { allowed_origins: vec![name.into()], ..args() })
            .map(|access| access.origins)
    };
    assert!(origins("https://Chat.example.com").unwrap().contain("https://chat.example.com"));
    assert!(origins("vscode-webview://x").is_ok() && origins("null").is_ok());
    assert_eq!(origins("*"), Ok(Names::Any));
    for wrong in ["chat.example.com", "https://", "https://a/", "https://a/b"] {
        assert!(origins(wrong).unwrap_err().starts_with("--allowed-origins: "), "{wrong}");
    }
    let error = check(RouterArgs { cache_sharing: "none".into(), ..args() }).unwrap_err();
    assert!(error.starts_with("--cache-sharing: "), "{error}");
}

proptest::proptest! {
    #[test]
    fn any_file_is_read_or_refused(lines in proptest::collection::vec(".*", 0..4)) {
        let text = lines.join("\n");
        let mut read = Keys::default();
        let mut good = 0;
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            good += usize::from(read.add(line, Role::Client).is_ok());
        }
        proptest::prop_assert!(good == 0 || !read.is_empty());
    }
}
