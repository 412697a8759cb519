//! The program as people start it: what it says of wrong settings, what it warns of, and signals.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};

const ROUTER: &str = env!("CARGO_BIN_EXE_headrace-router");
const FREE_PORTS: &str = "--port 0 --worker-listen 127.0.0.1:0";

/// A shell that becomes a router with these flags, after `before`.
fn shell(before: &str, flags: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{before} exec {ROUTER} {FREE_PORTS} {flags}")]);
    for variable in ["HEADRACE_LOG", "HEADRACE_SECRET", "HEADRACE_API_KEY", "HEADRACE_ADMIN_KEY"] {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts it, and waits until it listens.
fn started(mut command: Command) -> Child {
    let mut router = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(router.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("for clients"), "{line}");
    router
}

/// The exit status, `None` where a signal was its end, and the log.
fn ended_by(signal: &str, mut router: Child) -> (Option<i32>, String) {
    let pid = router.id().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    let mut log = String::new();
    router.stderr.as_mut().unwrap().read_to_string(&mut log).unwrap();
    (router.wait().unwrap().code(), log)
}

/// What it says of settings that cannot be right.
fn refused(flags: &str, variable: Option<(&str, &str)>) -> String {
    let output = shell("", flags).envs(variable).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_wrong_variable_is_named_and_not_the_flag_that_was_not_given() {
    let of_variable = refused("", Some(("HEADRACE_SECRET", "short")));
    assert!(of_variable.starts_with("error: HEADRACE_SECRET: the secret"), "{of_variable}");
    let of_variable = refused("", Some(("HEADRACE_LOG", "foo")));
    assert!(of_variable.starts_with("error: HEADRACE_LOG: \"foo\""), "{of_variable}");
    let of_flag = refused("--log-level foo", Some(("HEADRACE_LOG", "info")));
    assert!(of_flag.starts_with("error: --log-level: \"foo\""), "{of_flag}");
}

#[test]
fn at_the_level_that_python_calls_warning_warnings_are_logged() {
    let limit = "ulimit -Sn 64 && ulimit -Hn 256 &&";
    let router = started(shell(limit, "--log-level warning --max-connections 1000"));
    let (_, log) = ended_by("-TERM", router);
    assert!(log.contains(" WARN ") && !log.contains(" INFO "), "{log}");
}

#[test]
fn fewer_connections_than_usual_are_no_reason_to_warn_and_fewer_than_asked_for_are() {
    let limit = "ulimit -Sn 64 && ulimit -Hn 256 &&";
    let (status, log) = ended_by("-TERM", started(shell(limit, "")));
    assert!(
        status == Some(0) && !log.contains(" WARN ") && log.contains("connections=224"),
        "{log}"
    );
    let (_, log) = ended_by("-TERM", started(shell(limit, "--max-connections 1000")));
    assert!(
        log.contains(" WARN ") && log.contains("fewer clients than --max-connections"),
        "{log}"
    );
}

#[test]
fn a_hang_up_drains() {
    let (status, log) = ended_by("-HUP", started(shell("trap - HUP;", "")));
    assert!(status == Some(0) && log.contains("draining") && log.contains("stopped"), "{log}");
}

#[test]
fn where_there_are_files_a_hang_up_reads_them_again_and_ends_nothing() {
    let file = std::env::temp_dir().join(format!("headrace-hangup-{}", std::process::id()));
    std::fs::write(&file, "first\n").unwrap();
    // a session of its own has no terminal that could be gone
    let mut router = started(shell("trap - HUP;", &format!("--api-key-file {}", file.display())));
    std::fs::write(&file, "no key on this sesame line\n").unwrap();
    let pid = router.id().to_string();
    assert!(Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    let mut lines = BufReader::new(router.stderr.take().unwrap()).lines();
    let refused = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("refused")));
    let refused = refused.expect("it is said").unwrap();
    assert!(refused.contains(" ERROR ") && refused.contains("line 1"), "{refused}");
    assert!(!refused.contains("sesame"), "{refused}");
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(router.wait().unwrap().code(), Some(0), "{rest:?}");
    assert!(rest.iter().any(|line| line.contains("draining")), "{rest:?}");
    std::fs::remove_file(&file).unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn a_hang_up_that_nohup_has_ignored_stays_ignored() {
    let router = started(shell("trap '' HUP;", ""));
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.id())).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    assert_eq!(u64::from_str_radix(mask, 16).unwrap() & 1, 1, "{status}");
    assert_eq!(ended_by("-TERM", router).0, Some(0));
}
