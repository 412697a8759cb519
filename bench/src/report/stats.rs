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
    /// `None` without samples.
    pub(crate) fn of(samples: &[Duration]) -> Option<Self> {
        Self::of_ms(samples.iter().map(|sample| sample.as_secs_f64() * 1e3))
    }

    /// `None` without samples. Quantiles are nearest-rank: each is a sample that was seen.
    pub(crate) fn of_ms(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let sorted = sorted(samples);
        let (count, max) = (sorted.len(), *sorted.last()?);
        let rank = |q: f64| sorted[((q * count as f64).ceil() as usize).clamp(1, count) - 1];
        let mean = sorted.iter().sum::<f64>() / count as f64;
        Some(Self { count, mean, p50: rank(0.50), p90: rank(0.90), p99: rank(0.99), max })
    }
}

pub(crate) fn sorted(samples: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = samples.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// At most `most` of the sorted samples, evenly over their ranks, with the least and the greatest: enough for a curve.
/// Microseconds are kept.
pub(crate) fn thinned(sorted_ms: &[f64], most: usize) -> Vec<f64> {
    let rounded = |ms: f64| (ms * 1e3).round() / 1e3;
    if sorted_ms.len() <= most {
        return sorted_ms.iter().map(|ms| rounded(*ms)).collect();
    }
    let at = |i: usize| i * (sorted_ms.len() - 1) / (most - 1);
    (0..most).map(|i| rounded(sorted_ms[at(i)])).collect()
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
        let quantiles = Quantiles::of_ms((1..=100).rev().map(f64::from)).unwrap();
        assert_eq!(quantiles.count, 100);
        assert_eq!((quantiles.p50, quantiles.p90, quantiles.p99), (50.0, 90.0, 99.0));
        assert_eq!((quantiles.mean, quantiles.max), (50.5, 100.0));
        let one = Quantiles::of_ms([3.0]).unwrap();
        assert_eq!((one.p50, one.p99), (3.0, 3.0));
    }

    #[test]
    fn no_samples_have_no_quantiles() {
        assert_eq!(Quantiles::of(&[]), None);
    }

    #[test]
    fn a_thinned_curve_keeps_its_ends() {
        let sorted: Vec<f64> = (0..1000).map(f64::from).collect();
        let few = thinned(&sorted, 11);
        assert_eq!(few.len(), 11);
        assert_eq!((few[0], few[5], few[10]), (0.0, 499.0, 999.0));
        assert_eq!(thinned(&sorted[..3], 11), [0.0, 1.0, 2.0]);
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
