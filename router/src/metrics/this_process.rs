//! What the operating system knows of this process, read off when `/metrics` is, under the names that Prometheus' own
//! libraries use. Linux alone tells it; elsewhere there are no such samples.

mod tasks;

use std::fmt;
use std::path::Path;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use rustix::process::{Resource, getrlimit};

use super::scrape::Scrape;

pub use tasks::Tasks;

/// Of `getconf CLK_TCK`: ticks of a second in `/proc`, the same on every Linux that Rust runs on.
const TICKS: f64 = 100.0;
/// Where Linux tells it.
const FOLDER: &str = "/proc/self";

/// The process that asks.
#[derive(Debug, Clone, Copy, Default)]
pub struct ThisProcess;

/// What is read off.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Usage {
    cpu_s: f64,
    resident_bytes: u64,
    virtual_bytes: u64,
    open_files: u64,
    /// In seconds since 1970; `None` where the machine does not say when it started.
    started_s: Option<f64>,
}

impl Usage {
    fn of(folder: &Path) -> Option<Self> {
        let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
        let status = std::fs::read_to_string(folder.join("status")).ok()?;
        let open_files = std::fs::read_dir(folder.join("fd")).ok()?.count();
        let machine = std::fs::read_to_string(folder.with_file_name("stat")).unwrap_or_default();
        Some(Self {
            cpu_s: seconds(&stat, USER)? + seconds(&stat, SYSTEM)?,
            resident_bytes: memory_bytes(&status, "VmRSS:")?,
            virtual_bytes: memory_bytes(&status, "VmSize:")?,
            open_files: u64::try_from(open_files).ok()?,
            started_s: booted_s(&machine)
                .and_then(|booted_s| Some(booted_s + seconds(&stat, STARTED)?)),
        })
    }
}

/// Fields of `/proc/PID/stat` behind the name: CPU time in user and in system code, and when it started after the machine did.
const USER: usize = 11;
const SYSTEM: usize = 12;
const STARTED: usize = 19;

/// A time in `/proc/PID/stat`. The second field, a name in brackets, may hold spaces and brackets.
fn seconds(stat: &str, field: usize) -> Option<f64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let ticks = after_name.split_ascii_whitespace().nth(field)?.parse::<u64>().ok()?;
    Some(ticks as f64 / TICKS)
}

/// When the machine started, in seconds since 1970, as `/proc/stat` has it.
fn booted_s(machine: &str) -> Option<f64> {
    let line = machine.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(line.trim().parse::<u64>().ok()? as f64)
}

/// Of `/proc/PID/status`, which counts in KiB.
fn memory_bytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1_024)
}

impl Collector for ThisProcess {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(usage) = Usage::of(Path::new(FOLDER)) else { return Ok(()) };
        let mut scrape = Scrape::new(encoder);
        let cpu = "User and system CPU time of the router's process.";
        scrape.counter("process_cpu_seconds_total", cpu, usage.cpu_s)?;
        let resident = "Memory of the router's process that is resident.";
        scrape.gauge("process_resident_memory_bytes", resident, usage.resident_bytes)?;
        let addresses = "Memory that the router's process has addresses for.";
        scrape.gauge("process_virtual_memory_bytes", addresses, usage.virtual_bytes)?;
        if let Some(started_s) = usage.started_s {
            let started = "When the router's process started, since 1970.";
            scrape.gauge("process_start_time_seconds", started, started_s)?;
        }
        scrape.gauge("process_open_fds", "Open file descriptors.", usage.open_files)?;
        match getrlimit(Resource::Nofile).current {
            Some(most) => {
                scrape.gauge("process_max_fds", "File descriptors that may be open.", most)
            }
            None => Ok(()), // there is no limit
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_brackets_moves_no_field() {
        let stat = "7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 150 50 13 14\n";
        assert_eq!((seconds(stat, USER), seconds(stat, SYSTEM)), (Some(1.5), Some(0.5)));
        assert_eq!(seconds(stat, STARTED), None, "a field is missing");
        assert_eq!(seconds("7 (a) S 1 2 3 4 5 6 7 8 9 10 x 50", USER), None);
        assert_eq!(seconds("", USER), None);
    }

    #[test]
    fn resident_memory_is_a_number_of_kib_or_not_known() {
        let resident_bytes = |status| memory_bytes(status, "VmRSS:");
        assert_eq!(resident_bytes("VmHWM:\t 9 kB\nVmRSS:\t   12 kB\nRss: 3 kB\n"), Some(12 << 10));
        for wrong in ["", "VmRSS:\t12", "VmRSS: x kB", "VmRSS: 18446744073709551615 kB"] {
            assert_eq!(resident_bytes(wrong), None, "{wrong}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_uses_something_and_no_process_uses_nothing() {
        let usage = Usage::of(Path::new(FOLDER)).expect("Linux tells it");
        assert!(usage.resident_bytes > 1 << 20 && usage.open_files >= 3, "{usage:?}");
        let held: Vec<_> = (0..5).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        assert!(usage.virtual_bytes >= usage.resident_bytes, "{usage:?}");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let age_s = now.as_secs_f64() - usage.started_s.expect("Linux tells it");
        // the machine's start is known to the second, and its clock may have been set since
        assert!((-2.0..86_400.0).contains(&age_s), "{age_s}");
        let more = Usage::of(Path::new(FOLDER)).expect("Linux tells it");
        assert!(more.open_files >= 3 + held.len() as u64, "{more:?}");
        assert_eq!(Usage::of(Path::new("/proc/self/no-such-folder")), None);
    }
}
