//! The router with a file of configuration, as people start it: precedence, errors, and SIGHUP.

use std::io::{BufRead as _, BufReader, Lines, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

const ROUTER: &str = env!("CARGO_BIN_EXE_headrace-router");
const PORTS: &str = "port = 0\nworker-listen = '127.0.0.1:0'\n";

/// A folder that ends with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("headrace-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// A file whose table of the router has free ports.
    fn config(&self, rest: &str) -> PathBuf {
        self.write("f.toml", &format!("[router]\n{PORTS}{rest}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn router(flags: &[&str]) -> Command {
    // whoever runs the tests may have had the signal ignored
    let mut command = Command::new("sh");
    command.args(["-c", "trap - HUP; exec \"$0\" \"$@\"", ROUTER]).args(flags);
    for variable in ["LOG", "SECRET", "API_KEY", "ADMIN_KEY", "CONFIG"] {
        command.env_remove(format!("HEADRACE_{variable}"));
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What it says of settings that cannot be right.
fn refused(mut command: Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("Usage: headrace-router"), "{text}");
    text
}

fn with_file(path: &Path, flags: &[&str]) -> Command {
    let mut command = router(&["--config", path.to_str().unwrap()]);
    command.args(flags);
    command
}

/// A router that listens.
struct Running {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
    /// HOST:PORT for clients.
    address: String,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let Some(address) = address.map(str::to_owned) else {
            let mut log = String::new();
            child.stderr.as_mut().unwrap().read_to_string(&mut log).unwrap();
            panic!("{line}{log}");
        };
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log, address }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// The next line of the log that has this in it.
    fn line(&mut self, text: &str) -> String {
        let line = self.log.find(|line| line.as_ref().is_ok_and(|line| line.contains(text)));
        line.unwrap_or_else(|| panic!("no line with {text}")).unwrap()
    }

    /// Has it read its files again, and says what it says of `files`.
    fn reloaded(&mut self, files: &str) -> String {
        self.signal("-HUP");
        self.line(&format!("files=\"{files}\""))
    }

    /// The whole answer to a request with these headers.
    fn asked(&self, head: &str, headers: &str) -> String {
        let mut socket = TcpStream::connect(&self.address).unwrap();
        let host = &self.address;
        let head = format!("{head} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n");
        socket.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    }

    fn metric(&self, line: &str) -> Option<String> {
        let page = self.asked("GET /metrics", "");
        page.lines().find_map(|one| one.strip_prefix(line)).map(|value| value.trim().to_owned())
    }

    /// Returns when `/metrics` has this line: the log may say earlier what it counts.
    fn until_metric(&self, line: &str, value: &str) {
        while self.metric(line).as_deref() != Some(value) {}
    }

    fn end(mut self) {
        self.signal("-TERM");
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn the_command_line_counts_before_the_environment_and_that_before_the_file() {
    let folder = Folder::new("precedence");
    let path = folder.config("log-level = 'nonsense'\nheartbeat-ms = 0\n[worker]\nanything = 1\n");
    let at = |line: usize| format!("error: {}:{line}: ", path.display());
    let of_file = refused(with_file(&path, &[]));
    assert!(of_file.starts_with(&format!("{}--log-level: \"nonsense\"", at(4))), "{of_file}");
    let mut of_variable = with_file(&path, &[]);
    of_variable.env("HEADRACE_LOG", "foo");
    let of_variable = refused(of_variable);
    assert!(of_variable.starts_with("error: HEADRACE_LOG: \"foo\""), "{of_variable}");
    let mut of_flag = with_file(&path, &["--log-level=bar"]);
    of_flag.env("HEADRACE_LOG", "info");
    let of_flag = refused(of_flag);
    assert!(of_flag.starts_with("error: --log-level: \"bar\""), "{of_flag}");
    let out_of_range = refused(with_file(&path, &["--log-level=info"]));
    assert!(out_of_range.starts_with(&format!("{}--heartbeat-ms: is 0", at(5))), "{out_of_range}");
    let mut named = router(&["--log-level=info", "--heartbeat-ms=10"]);
    named.env("HEADRACE_CONFIG", &path);
    Running::start(named).end();
    let mut other = router(&["--config", "/nonexistent/file"]);
    other.env("HEADRACE_CONFIG", &path);
    let other = refused(other);
    assert!(other.contains("/nonexistent/file: the configuration cannot be read"), "{other}");
    let mut empty = router(&["--port=0", "--worker-listen=127.0.0.1:0"]);
    empty.env("HEADRACE_CONFIG", "");
    Running::start(empty).end();
}

#[test]
fn a_secret_of_the_environment_counts_before_a_file_that_the_configuration_names() {
    let folder = Folder::new("secret");
    let path = folder.config("secret-file = '/nonexistent/secret'\n");
    let without = refused(with_file(&path, &[]));
    assert!(without.contains("f.toml:4: --secret-file: cannot read"), "{without}");
    let mut with = with_file(&path, &[]);
    with.env("HEADRACE_SECRET", "a-secret-of-the-environment");
    Running::start(with).end();
}

#[test]
fn what_is_wrong_in_the_file_has_its_line_and_what_is_right() {
    let folder = Folder::new("wrong");
    for (line, why) in [
        ("polcy = 'kv'", "[router] has no key \"polcy\"; did you mean policy?"),
        ("log_level = 'info'", "[router] has no key \"log_level\"; did you mean log-level?"),
        ("zzz = 1", "[router] has no key \"zzz\"; its keys are the flags that --help shows"),
        ("config = 'f.toml'", "[router] has no key \"config\"; "),
        ("help = true", "[router] has no key \"help\"; "),
        ("api-key = 'sesame'", "[router] has no key \"api-key\"; did you mean api-key-file?"),
        ("policy = 'kvv'", "invalid value 'kvv' for '--policy <POLICY>' [possible values: kv, "),
        ("max-streams = 'many'", "invalid value 'many' for '--max-streams <N>': "),
        ("max-streams = -1", "invalid value '-1' for '--max-streams <N>': "),
        ("host = ['a', 'b']", "host takes one HOST, not a list"),
        ("host = true", "host takes HOST, not true"),
        ("public-metrics = 'yes'", "public-metrics is a switch: write true or false"),
        ("cors-origin = 'null'\nallowed-origins = 'null'", "--allowed-origins is set at "),
        ("max-streams = 0", "--max-streams: is 0; it must be at least 1"),
    ] {
        let path = folder.config(line);
        let place = format!("error: {}:{}: ", path.display(), 3 + line.lines().count());
        let text = refused(with_file(&path, &[]));
        assert!(text.starts_with(&format!("{place}{why}")), "{line}: {text}");
        assert!(!text.contains("sesame"), "{text}");
    }
    let long = folder.config(&format!("host = '{}'", "x".repeat(100_000)));
    let text = refused(with_file(&long, &[]));
    assert!(text.contains("f.toml:4: the value is longer than") && text.len() < 500, "{text:.500}");
}

#[test]
fn lists_and_switches_and_other_names_are_what_would_be_typed() {
    let folder = Folder::new("lists");
    let path = folder.config(
        "queue-floors = [0.5, 0.2, 0.1]\ncors-origin = ['https://a.example', 'https://b.example']\n\
         public-metrics = true\nallow-anonymous-clients = false\nadmin-listen = []\n",
    );
    let running = Running::start(with_file(&path, &[]));
    for (origin, allowed) in [("https://b.example", true), ("https://c.example", false)] {
        let answer = running.asked("GET /health", &format!("Origin: {origin}\r\n"));
        let told = answer.contains(&format!("access-control-allow-origin: {origin}"));
        assert_eq!(told, allowed, "{answer}");
    }
    running.end();
}

#[test]
fn a_hang_up_puts_in_force_what_can_change() {
    let folder = Folder::new("reload");
    let keys = folder.write("keys", "alice-key\n");
    let keys = format!("api-key-file = '{}'\npublic-metrics = true\n", keys.display());
    let path = folder.config(&keys);
    let mut running = Running::start(with_file(&path, &[]));
    let models = |running: &Running, key: &str| {
        let bearer = format!("Authorization: Bearer {key}\r\nOrigin: https://a.example\r\n");
        running.asked("GET /v1/models", &bearer)
    };
    assert!(models(&running, "alice-key").starts_with("HTTP/1.1 200"));
    assert!(models(&running, "bob-key").starts_with("HTTP/1.1 401"));
    let others = folder.write("others", "bob-key\n");
    let more = "allowed-origins = ['https://a.example']\nlog-level = 'debug'\nmax-streams = 7\n";
    folder.config(&format!("api-key-file = '{}'\npublic-metrics = true\n{more}", others.display()));
    let line = running.reloaded("config");
    assert!(line.contains(" INFO ") && line.contains("read again, and in use"), "{line}");
    running.line("files=\"keys\"");
    assert!(models(&running, "alice-key").starts_with("HTTP/1.1 401"));
    let answer = models(&running, "bob-key");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("access-control-allow-origin: https://a.example"), "{answer}");
    let loaded = "headrace_reloads_total{files=\"config\",outcome=\"loaded\"}";
    assert_eq!(running.metric(loaded).as_deref(), Some("1"));
    folder.config(&format!(
        "api-key-file = '{}'\npublic-metrics = true\nlog-level = 'warn'\n",
        others.display()
    ));
    running.signal("-HUP"); // at this level nothing is said
    running.until_metric(loaded, "2");
    assert!(!models(&running, "bob-key").contains("access-control"));
    running.end();
}

#[test]
fn a_hang_up_is_refused_as_a_whole_where_anything_else_has_changed_or_is_wrong() {
    let folder = Folder::new("refused");
    let path = folder.config("public-metrics = true\n");
    let mut running = Running::start(with_file(&path, &["--retries=2"]));
    let allows = "public-metrics = true\nallowed-origins = ['https://a.example']\n";
    let keys = folder.write("keys", "alice-key\n");
    for (rest, why) in [
        (
            "policy = 'round-robin'\nheartbeat-ms = 500\n".into(),
            "--heartbeat-ms, --policy cannot change",
        ),
        ("max-streams = 0\n".into(), "f.toml:6: --max-streams: is 0"),
        ("max-streems = 1\n".into(), "did you mean max-streams?"),
        ("max-streams = \n".into(), "f.toml:6: this is no TOML"),
        (
            format!("api-key-file = '{}'\n", keys.display()),
            "whether clients need a key cannot change",
        ),
        ("api-key-file = '/nonexistent/keys'\n".into(), "--api-key-file: cannot read"),
    ] {
        folder.config(&format!("{allows}{rest}"));
        let line = running.reloaded("config");
        assert!(line.contains(" ERROR ") && line.contains("refused"), "{line}");
        assert!(line.contains(why), "{rest}: {line}");
        let answer = running.asked("GET /health", "Origin: https://a.example\r\n");
        assert!(!answer.contains("access-control"), "nothing of it counts: {answer}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(running.reloaded("config").contains("cannot be read"));
    let outcome =
        |outcome| format!("headrace_reloads_total{{files=\"config\",outcome=\"{outcome}\"}}");
    assert_eq!(running.metric(&outcome("refused")).as_deref(), Some("7"));
    running.until_metric("headrace_reloads_refused", "1");
    // a flag of the command line counts before the file, so this changes nothing
    folder.config(&format!("{allows}retries = 9\n"));
    assert!(running.reloaded("config").contains("in use"));
    let answer = running.asked("GET /health", "Origin: https://a.example\r\n");
    assert!(answer.contains("access-control"), "{answer}");
    assert_eq!(running.metric(&outcome("loaded")).as_deref(), Some("1"));
    running.until_metric("headrace_reloads_refused", "0");
    running.end();
}

/// As `headrace serve` starts its router: with its own table, in which workers have keys, and flags that it made of others.
#[test]
fn the_router_of_another_command_names_keys_that_are_not_its_own() {
    let folder = Folder::new("table");
    let text = |rest: &str| format!("[serve]\npolicy = 'kv'\nworkers = 1\n{rest}");
    let path = folder.write("f.toml", &text("max-streams = 9\n"));
    let flags = ["--config-table=serve", "--port=0", "--worker-listen=127.0.0.1:0", "--policy=kv"];
    let mut running = Running::start(with_file(&path, &flags));
    assert!(running.reloaded("config").contains("in use"));
    for (rest, why) in [
        ("kv-memory = '1GiB'\n", "--kv-memory cannot change"),
        ("max-streams = 0\n", "f.toml:4: --max-streams: is 0"),
        ("retries = 9\n", "--retries cannot change"),
    ] {
        folder.write("f.toml", &text(rest));
        let line = running.reloaded("config");
        assert!(line.contains("refused") && line.contains(why), "{line}");
    }
    folder.write("f.toml", "[serve]\npolicy = 'round-robin'\nmax-streams = 5\n");
    let line = running.reloaded("config");
    assert!(line.contains("--policy, --workers cannot change"), "{line}");
    folder.write("f.toml", &text("max-streams = 5\n"));
    assert!(running.reloaded("config").contains("in use"));
    running.end();
}
