//! Files of recorded traffic, packed or not: summed up, or refused with the line.
#![no_main]

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

fn file() -> &'static PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        std::env::temp_dir().join(format!("headrace-fuzz-{}.jsonl", std::process::id()))
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut written = std::fs::File::create(file()).expect("the folder can be written");
    written.write_all(bytes).expect("there is room");
    let name = file().to_str().expect("it is ASCII");
    let status = headrace_bench::main(["headrace-bench", "trace", name]);
    assert!(status == 0 || status == 2, "{status}: a bad trace is bad input");
});
