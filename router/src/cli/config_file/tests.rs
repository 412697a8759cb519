//! What is read of a file, and that whatever is wrong with it is told with its line.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::*;

fn parsed(text: &str) -> Result<ConfigFile, String> {
    ConfigFile::parse("f.toml", text)
}

fn refused(text: &str) -> String {
    parsed(text).unwrap_err()
}

/// A name for a file of one test, which nobody has yet.
fn fresh(name: &str) -> PathBuf {
    let name = format!("headrace-config-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn keys_come_in_the_order_of_their_lines_with_what_would_be_typed() {
    let text = "# a comment\n[router]\nport = 8_000\nlog-level = 'debug'\n\n[serve]\nworkers = 2\n\
                queue-floors = [0.5, 0.25, 1e-2]\nallow-anonymous-clients = true\nkv-memory = \"2GiB\"\n";
    let file = parsed(text).unwrap();
    let text = |text: &str| SettingValue::Text(text.into());
    let rows: Vec<_> = file
        .settings
        .iter()
        .map(|one| (one.command.as_str(), one.key.as_str(), one.line, one.value.clone()))
        .collect();
    let floors = ["0.5", "0.25", "1e-2"].map(String::from).to_vec();
    assert_eq!(
        rows,
        [
            ("router", "port", 3, text("8000")),
            ("router", "log-level", 4, text("debug")),
            ("serve", "workers", 7, text("2")),
            ("serve", "queue-floors", 8, SettingValue::Texts(floors)),
            ("serve", "allow-anonymous-clients", 9, SettingValue::Switch(true)),
            ("serve", "kv-memory", 10, text("2GiB")),
        ]
    );
    assert_eq!(file.place(9), "f.toml:9");
    assert_eq!(parsed("").unwrap().settings, []);
    assert_eq!(parsed("\r\n[router]\r\nport = 0x10\r\n").unwrap().settings[0].value, text("16"));
}

#[test]
fn what_is_wrong_has_its_line_and_what_is_right() {
    for (text, why) in [
        ("[router]\nport = \n", "f.toml:2: this is no TOML: "),
        ("[router\nport = 1\n", "f.toml:1: this is no TOML: "),
        ("[router]\nport = 1\nhost = 'a'\nport = 2\n", "f.toml:4: this is no TOML: duplicate key"),
        (
            "[router]\nport = 1\n\n[router]\nhost = 'a'\n",
            "f.toml:4: this is no TOML: duplicate key",
        ),
        ("\nport = 1\n", "f.toml:2: \"port\" is in no table; a key stands under"),
        (
            "[ruoter]\nport = 1\n",
            "f.toml:1: there is no command \"ruoter\"; did you mean [router]?",
        ),
        ("\n\n[zzz]\n", "f.toml:3: there is no command \"zzz\"; the tables are [serve], [router]"),
        ("[router]\nport = 1979-05-27\n", "f.toml:2: \"port\" is of the type datetime, where"),
        ("[router.log]\nlevel = 'info'\n", "f.toml:1: \"log\" is of the type table, where"),
        ("[router]\nhosts = [['a']]\n", "f.toml:2: \"hosts\" is of the type array, where"),
        ("[[router]]\nport = 1\n", "f.toml:1: \"router\" is in no table"),
    ] {
        let error = refused(text);
        assert!(error.starts_with(why), "{text:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let deep = format!("[router]\nport = {}\n", "[".repeat(100_000));
    assert!(refused(&deep).starts_with("f.toml:2: this is no TOML: "));
    let long = format!("[{}]\n", "x".repeat(100_000));
    assert!(refused(&long).len() < 400, "errors repeat only a part of a long name");
}

#[test]
fn files_that_cannot_be_files_of_configuration_are_told_apart() {
    let folder = std::env::temp_dir();
    let path = fresh("odd");
    let error = |path: &PathBuf| ConfigFile::read(path).unwrap_err();
    assert!(error(&path).contains("cannot be read: No such file"), "{}", error(&path));
    assert!(error(&folder).contains("this is a folder"), "{}", error(&folder));
    symlink(&path, &path).unwrap();
    assert!(error(&path).contains("cannot be read: "), "a link to itself: {}", error(&path));
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"[router]\nhost = '\xff'\n").unwrap();
    assert!(error(&path).ends_with("line 2 is no text of UTF-8"), "{}", error(&path));
    let comments = |bytes: usize| "#".repeat(bytes - 1) + "\n";
    let longest = usize::try_from(LONGEST_FILE).unwrap();
    std::fs::write(&path, comments(longest)).unwrap();
    assert_eq!(ConfigFile::read(&path).unwrap().settings, []);
    std::fs::write(&path, comments(longest + 1)).unwrap();
    assert!(error(&path).ends_with("has 1048576 bytes at most"), "{}", error(&path));
    std::fs::remove_file(&path).unwrap();
    let endless = PathBuf::from("/dev/zero");
    assert!(error(&endless).ends_with("has 1048576 bytes at most"), "{}", error(&endless));
}
