//! Tells the crate how it is optimised, for whoever measures it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let level = std::env::var("OPT_LEVEL").expect("cargo sets OPT_LEVEL");
    println!("cargo:rustc-env=HEADRACE_OPT_LEVEL={level}");
}
