//! Random names and seeds: unique and unpredictable to clients, though no key of anything.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// SipHash with a key that the system drew at start, over a counter.
pub(in crate::http) fn random() -> u64 {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

/// `prefix` and 32 hexadecimal digits.
pub(in crate::http) fn name(prefix: &str) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut name = String::with_capacity(prefix.len() + 32);
    name.push_str(prefix);
    let bytes = [random(), random()].map(u64::to_be_bytes);
    for byte in bytes.as_flattened() {
        name.push(char::from(DIGITS[usize::from(byte >> 4)]));
        name.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    name
}

/// Seconds since 1970.
pub(in crate::http) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_differ() {
        let names: std::collections::HashSet<_> = (0..1000).map(|_| super::name("x-")).collect();
        assert_eq!(names.len(), 1000);
        for name in &names {
            let digits = name.strip_prefix("x-").unwrap();
            assert!(digits.len() == 32 && u128::from_str_radix(digits, 16).is_ok(), "{name}");
            assert_eq!(digits, digits.to_lowercase());
        }
        for digit in "0123456789abcdef".chars() {
            assert!(names.iter().any(|name| name.ends_with(digit)), "{digit}");
        }
    }
}
