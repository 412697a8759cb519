//! Variables that are right, wrong, and for somebody else. Sockets that are passed for real: tests/deploy.

use std::os::unix::fs::PermissionsExt;

use super::*;

const PID: u32 = 77;

fn said(listen: Option<(&str, &str)>) -> ServiceVariables {
    ServiceVariables {
        listen_pid: Some(PID.to_string()),
        listen_fds: listen.map(|(fds, _)| fds.to_owned()),
        listen_names: listen.map(|(_, names)| names.to_owned()),
        ..ServiceVariables::default()
    }
}

fn problem(said: &ServiceVariables) -> String {
    ServiceConfig::check(said, PID).expect_err("it is wrong").to_string()
}

#[test]
fn without_variables_nothing_is_passed_and_nobody_is_told() {
    let service = ServiceConfig::check(&ServiceVariables::default(), PID).unwrap();
    assert!(service.passed.is_empty() && !service.shares_clients());
    assert_eq!((service.notify, service.watchdog), (None, None));
    assert!(ServiceConfig::check(&said(None), PID).unwrap().passed.is_empty());
    assert!(ServiceConfig::check(&said(Some(("0", ""))), PID).is_err(), "one name, no socket");
}

#[test]
fn what_is_for_another_process_is_not_looked_at() {
    let mut wrong = said(Some(("many", "")));
    wrong.listen_pid = Some("78".into());
    wrong.watchdog_pid = Some("78".into());
    wrong.watchdog_usec = Some("soon".into());
    let service = ServiceConfig::check(&wrong, PID).unwrap();
    assert!(service.passed.is_empty() && service.watchdog.is_none());
    wrong.listen_pid = None;
    assert!(ServiceConfig::check(&wrong, PID).is_ok());
}

#[test]
fn wrong_variables_are_refused_with_what_would_be_right() {
    for (fds, names, part) in [
        ("many", "http", "it may be 0 to 16"),
        ("-1", "http", "it may be 0 to 16"),
        ("17", "http", "it may be 0 to 16"),
        ("2", "http", "1 names for 2 sockets"),
        ("1", "http:workers", "2 names for 1 sockets"),
        ("1", "htp", "the names are http, workers and admin"),
        ("1", "", "the names are http, workers and admin"),
    ] {
        let problem = problem(&said(Some((fds, names))));
        assert!(problem.contains(part), "{fds} {names}: {problem}");
    }
    let mut unnamed = said(Some(("1", "")));
    unnamed.listen_names = None;
    assert!(problem(&unnamed).contains("0 names for 1 sockets"));
}

#[test]
fn signs_of_life_are_for_whoever_is_named_or_for_anybody() {
    let watchdog = |pid: Option<&str>, us: &str| {
        let said = ServiceVariables {
            watchdog_pid: pid.map(str::to_owned),
            watchdog_usec: Some(us.into()),
            ..ServiceVariables::default()
        };
        ServiceConfig::check(&said, PID).map(|service| service.watchdog)
    };
    assert_eq!(watchdog(None, "30000000").unwrap(), Some(Duration::from_secs(30)));
    assert_eq!(watchdog(Some("77"), "1").unwrap(), Some(Duration::from_micros(1)));
    assert_eq!(watchdog(Some("7"), "1").unwrap(), None);
    for wrong in ["0", "-1", "1.5", "soon"] {
        assert!(watchdog(None, wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_state_is_told_to_a_path_or_an_abstract_name() {
    let path = notify_address("/run/systemd/notify").unwrap();
    assert_eq!(path, NotifyAddress::Path("/run/systemd/notify".into()));
    for wrong in ["", "@", "run/notify", "vsock:2:1"] {
        assert!(notify_address(wrong).is_err(), "{wrong}");
    }
    let name = notify_address("@name");
    assert_eq!(name.is_ok(), cfg!(target_os = "linux"));
}

fn passed_at(role: SocketRole, socket: OwnedFd) -> Result<PassedSocket, String> {
    let address = address_of(&socket)?;
    Ok(PassedSocket { role, address, socket: Arc::new(socket) })
}

fn args_with(passed: Vec<PassedSocket>) -> Result<RouterArgs, ConfigError> {
    let mut args = RouterArgs::default();
    ServiceConfig { passed, ..ServiceConfig::default() }.place(&mut args)?;
    Ok(args)
}

#[test]
fn flags_say_where_passed_sockets_listen() {
    let tcp = || TcpListener::bind("127.0.0.1:0").unwrap();
    let (http, workers) = (tcp(), tcp());
    let (at, workers_at) = (http.local_addr().unwrap(), workers.local_addr().unwrap());
    let passed = vec![
        passed_at(SocketRole::Clients, http.into()).unwrap(),
        passed_at(SocketRole::Workers, workers.into()).unwrap(),
    ];
    let service = ServiceConfig { passed: passed.clone(), ..ServiceConfig::default() };
    assert!(service.shares_clients());
    let args = args_with(passed).unwrap();
    assert_eq!((args.host.as_str(), args.port), ("127.0.0.1", at.port()));
    assert_eq!(args.worker_listen, workers_at.to_string());
    let address = WorkerListen::Tcp(at.to_string());
    assert!(service.take(SocketRole::Clients, &address).unwrap().is_some());
    assert!(service.take(SocketRole::Workers, &address).unwrap().is_none(), "of another role");
    let other = WorkerListen::Tcp("127.0.0.1:1".into());
    assert!(service.take(SocketRole::Clients, &other).unwrap().is_none());
}

#[test]
fn a_socket_of_clients_is_tcp_and_one_of_operators_is_private() {
    let folder = std::env::temp_dir().join(format!("headrace-passed-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("admin.sock");
    let socket = OwnedFd::from(UnixListener::bind(&path).unwrap());
    let set = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    let as_role = |role| args_with(vec![passed_at(role, socket.try_clone().unwrap()).unwrap()]);
    set(0o600);
    let own = format!("unix:{}", path.display());
    assert_eq!(as_role(SocketRole::Operators).unwrap().admin_listen, std::slice::from_ref(&own));
    assert_eq!(as_role(SocketRole::Workers).unwrap().worker_listen, own);
    assert!(as_role(SocketRole::Clients).unwrap_err().to_string().contains("pass one of TCP"));
    for mode in [0o666, 0o660, 0o606, 0o601] {
        set(mode);
        let problem = as_role(SocketRole::Operators).unwrap_err().to_string();
        assert!(problem.contains("SocketMode=0600"), "{mode:o}: {problem}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let problem = as_role(SocketRole::Operators).unwrap_err().to_string();
    assert!(problem.contains("cannot look at"), "{problem}");
}

#[test]
fn what_does_not_listen_for_streams_is_refused() {
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (pair, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for (socket, part) in [
        (OwnedFd::from(datagrams), "does not listen"),
        (OwnedFd::from(connected), "does not listen"),
        (OwnedFd::from(pair), "does not listen"),
        (OwnedFd::from(file), "is no socket"),
    ] {
        let problem = passed_at(SocketRole::Clients, socket).unwrap_err();
        assert!(problem.contains(part), "{problem}");
    }
    assert!(descriptor(1_000_000).is_err(), "no such descriptor");
}
