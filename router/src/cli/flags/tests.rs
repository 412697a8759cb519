//! The table says what the help says, and the check refuses what the program would refuse, in the same words.

use super::*;

const USAGE: &str = "headrace serve [FLAGS] [MODEL]";

fn flag(name: &str) -> RouterFlag {
    router_flags().into_iter().find(|flag| flag.name == name).unwrap()
}

fn refused(flags: &[&str]) -> String {
    let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
    check_router(&flags, USAGE).unwrap_err()
}

#[test]
fn the_table_has_what_the_help_shows() {
    let help = Cli::command().render_long_help().to_string();
    let flags = router_flags();
    for flag in &flags {
        assert!(help.contains(&format!("\n      {}", flag.name)), "{}", flag.name);
        assert!(flag.help.len() > 20, "{flag:?} says nothing");
    }
    let shown = help.lines().filter(|line| line.starts_with("      --")).count();
    assert_eq!(flags.len(), shown, "and nothing of the help is missing");
}

#[test]
fn a_flag_tells_its_default_its_choices_and_its_variable() {
    let policy = flag("--policy");
    assert_eq!(policy.default.as_deref(), Some("kv"));
    assert!(policy.choices.contains(&"round-robin".to_owned()) && !policy.repeated);
    assert_eq!(flag("--port").default.as_deref(), Some("8000"));
    let floors = flag("--queue-floors");
    assert_eq!((floors.default.as_deref(), floors.repeated), (Some("0.5,0.2,0.05"), false));
    assert_eq!(flag("--log-level").variable.as_deref(), Some("HEADRACE_LOG"));
    let admin = flag("--admin-listen");
    assert_eq!((admin.value.as_deref(), admin.repeated), (Some("ADDRESS"), true));
    let anonymous = flag("--allow-anonymous-clients");
    assert_eq!((anonymous.value, anonymous.default), (None, None));
    assert!(anonymous.choices.is_empty() && !anonymous.repeated);
    assert_eq!(flag("--secret-file").group.as_deref(), Some("Security"));
}

#[test]
fn all_that_can_change_while_the_router_serves_are_flags_of_it() {
    let flags = router_flags();
    let changing: Vec<_> = flags.iter().filter(|flag| flag.reloads).collect();
    assert_eq!(changing.len(), CHANGEABLE.len());
    assert!(!flag("--port").reloads && flag("--log-level").reloads);
    assert_eq!(flag("--config").variable.as_deref(), Some(CONFIG_VARIABLE));
    assert_eq!(flag("--secret-file").variable.as_deref(), Some("HEADRACE_SECRET"));
}

#[test]
fn what_is_refused_is_named_with_the_usage_of_the_command() {
    for (flags, why) in [
        (&["--polcy=kv"][..], "'--policy'"),             // misspelt
        (&["--policy=kvv"], "possible values: kv"),      // none of the choices
        (&["--port=many"], "invalid value 'many'"),      // of another type
        (&["--port=70000"], "70000"),                    // out of the type's bounds
        (&["--heartbeat-ms=0"], "--heartbeat-ms: is 0"), // out of the router's bounds
        (&["--heartbeat-ms=4000"], "three heartbeats"),  // in conflict with another flag
        (&["--policy=kv", "--policy=kv"], "multiple times"),
        (&["--queue-floors=0.4,0.2,0.1", "--queue-floors=0.4,0.2,0.1"], "multiple times"),
        (&["--queue-floors=0.4,0.2"], "has 2 shares"),
        (&["--queue-floors=0.4,much,0.1"], "invalid value 'much'"),
        (&["--policy"], "value is required"),
        (&["--allow-anonymous-clients=yes"], "unexpected value 'yes'"),
        (&["--secret-file=/nonexistent/secret"], "--secret-file: cannot read"),
        (&["model"], "unexpected argument 'model'"),
    ] {
        let text = refused(flags);
        assert!(text.starts_with("error: ") && text.contains(why), "{flags:?}: {text}");
        assert!(text.contains(&format!("Usage: {USAGE}\n")), "{flags:?}: {text}");
    }
}

#[test]
fn a_very_long_value_is_refused_like_a_short_one() {
    let text = refused(&[&format!("--worker-listen={}", "x".repeat(1 << 20))]);
    assert!(text.contains("at most 16384: --worker-listen=xxx"), "{text:.200}");
    assert!(text.len() < 400, "{} bytes of error", text.len());
    let longest = "--allowed-hosts=".len();
    let hosts = format!("--allowed-hosts={}", "h,".repeat(((16 << 10) - longest) / 2));
    check_router(&[hosts], USAGE).unwrap();
}

#[test]
fn what_the_router_would_take_is_taken() {
    check_router(&[], USAGE).unwrap();
    let flags = ["--policy=round-robin", "--admin-listen=unix:/a", "--admin-listen=unix:/b"];
    check_router(&flags.map(str::to_owned), USAGE).unwrap();
}
