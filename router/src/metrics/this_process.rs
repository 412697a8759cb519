//! What the operating system knows of this process, read off when `/metrics` is, under the names that Prometheus' own
//! libraries use. Linux alone tells it; elsewhere there are no such samples.

use std::fmt;
use std::path::Path;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use rustix::process::{Resource, getrlimit};

use super::scrape::Scrape;

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
    open_files: u64,
}

impl Usage {
    fn of(folder: &Path) -> Option<Self> {
        let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
        let status = std::fs::read_to_string(folder.join("status")).ok()?;
        let open_files = std::fs::read_dir(folder.join("fd")).ok()?.count();
        Some(Self {
            cpu_s: cpu_seconds(&stat)?,
            resident_bytes: resident_bytes(&status)?,
            open_files: u64::try_from(open_files).ok()?,
        })
    }
}

/// User and system time in `/proc/PID/stat`. The second field, a name in brackets, may hold spaces and brackets.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? as f64 + ticks()? as f64) / TICKS)
}

/// Of `/proc/PID/status`, which counts in KiB.
fn resident_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
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
        assert_eq!(cpu_seconds(stat), Some(2.0));
        assert_eq!(cpu_seconds("7 (a) S 1 2 3 4 5 6 7 8 9 10 150"), None, "a field is missing");
        assert_eq!(cpu_seconds("7 (a) S 1 2 3 4 5 6 7 8 9 10 x 50"), None);
        assert_eq!(cpu_seconds(""), None);
    }

    #[test]
    fn resident_memory_is_a_number_of_kib_or_not_known() {
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
        let more = Usage::of(Path::new(FOLDER)).expect("Linux tells it");
        assert!(more.open_files >= 3 + held.len() as u64, "{more:?}");
        assert_eq!(Usage::of(Path::new("/proc/self/no-such-folder")), None);
    }
}
