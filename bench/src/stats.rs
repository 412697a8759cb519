//! Percentiles of samples and CPU time of processes.

use std::time::Duration;

use serde::Serialize;

/// Distribution of samples in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Quantiles {
    /// Number of samples.
    pub(crate) count: usize,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Quantiles {
    /// `None` without samples. Quantiles are nearest-rank: each is a sample that was seen.
    pub(crate) fn of(samples: &[Duration]) -> Option<Self> {
        let mut ms: Vec<f64> = samples.iter().map(|s| s.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let count = ms.len();
        let max = *ms.last()?;
        let rank = |q: f64| ms[((q * count as f64).ceil() as usize).clamp(1, count) - 1];
        let mean = ms.iter().sum::<f64>() / count as f64;
        Some(Self { count, mean, p50: rank(0.50), p90: rank(0.90), p99: rank(0.99), max })
    }
}

/// User and system seconds that a process and its waited-for children have used.
///
/// # Errors
/// The process does not exist or this system has no `/proc`.
pub(crate) fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the command in brackets and may hold blanks; the rest is plain.
    let (_, fields) =
        stat.rsplit_once(") ").ok_or_else(|| anyhow::anyhow!("odd /proc/{pid}/stat"))?;
    let ticks =
        fields.split(' ').skip(11).take(2).map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    Ok(ticks as f64 / TICKS_PER_SECOND)
}

/// Kernel clock ticks in `/proc`; 100 on every Linux in use.
const TICKS_PER_SECOND: f64 = 100.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples_that_were_seen() {
        let samples: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        let q = Quantiles::of(&samples).unwrap();
        assert_eq!((q.count, q.p50, q.p90, q.p99, q.max), (200, 100.0, 180.0, 198.0, 200.0));
        assert_eq!(q.mean, 100.5);
    }

    #[test]
    fn no_samples_have_no_quantiles() {
        assert_eq!(Quantiles::of(&[]), None);
    }

    #[test]
    fn this_process_uses_cpu() {
        let before = cpu_seconds(std::process::id()).unwrap();
        let mut x = 0_u64;
        while cpu_seconds(std::process::id()).unwrap() < before + 0.02 {
            x = std::hint::black_box(x + 1);
        }
        assert!(x > 0);
    }
}
