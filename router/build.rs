//! Has the linker fold functions with the same machine code, where it can: 350 kB of the released router, mostly what generic
//! code became for types that look alike. The few places that compare addresses of functions, in SQLite and zlib, ask for
//! functions whose code is like no other's. The flag is that of lld, which is Rust's linker on x86-64 Linux from Rust 1.90 on;
//! others do not know it, so the linker is asked first.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const FOLD: &str = "-Wl,--icf=all";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("PROFILE").is_some_and(|profile| profile == "release") && links_with_it() {
        println!("cargo:rustc-link-arg-bins={FOLD}");
    }
}

/// A program of no function of its own links with the flag.
fn links_with_it() -> bool {
    let given = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    let (Some(rustc), Some(out)) = (given("RUSTC"), given("OUT_DIR")) else { return false };
    let out = PathBuf::from(out);
    let source = out.join("empty.rs");
    if std::fs::write(&source, "fn main() {}\n").is_err() {
        return false;
    }
    let mut probe = Command::new(rustc);
    probe.args(["--edition=2024", "--crate-name=empty", "--out-dir"]).arg(&out).arg(&source);
    probe.args([OsString::from("-C"), format!("link-arg={FOLD}").into()]);
    if let Some(target) = given("TARGET") {
        probe.arg("--target").arg(target);
    }
    if let Some(linker) = given("RUSTC_LINKER") {
        let mut option = OsString::from("linker=");
        option.push(linker);
        probe.arg("-C").arg(option);
    }
    if let Ok(flags) = env::var("CARGO_ENCODED_RUSTFLAGS") {
        probe.args(flags.split('\x1f').filter(|flag| !flag.is_empty()));
    }
    let quiet = probe.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
