//! Open files: the limit is raised as far as it goes, and connections of clients leave some for everything else.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::MAX_CONNECTIONS;

/// Of all descriptors, one in so many is kept for workers, logs and the runtime. A guess: more workers than clients is
/// nothing that happens.
const KEPT_SHARE: u64 = 8;
/// But at least as many as these.
const KEPT_LEAST: u64 = 32;
/// And at most as many: a fleet that needs more of them runs where the limit is a million, not 20,000.
const KEPT_MOST: u64 = 256;

/// Raises this process's soft limit of open files to the hard one, and returns how many clients may be connected: `wanted`,
/// or fewer where the limit does not allow them. Whoever named a number is warned.
pub(crate) fn connections(wanted: usize) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    let limit = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => raised.current,
        Err(error) => {
            tracing::warn!(%error, "cannot raise the limit of open files");
            limit.current
        }
    };
    let most = allowed(wanted, limit);
    if most < wanted && wanted == MAX_CONNECTIONS {
        tracing::info!(
            open_files = limit,
            connections = most,
            "the limit of open files bounds the clients that can be connected at a time (`ulimit -Hn`)"
        );
    } else if most < wanted {
        tracing::warn!(
            max_connections = wanted,
            open_files = limit,
            connections = most,
            "fewer clients than --max-connections can be connected at a time; raise the hard limit (`ulimit -Hn`)"
        );
    }
    most
}

/// `limit`: of open files, `None` without one.
fn allowed(wanted: usize, limit: Option<u64>) -> usize {
    let Some(limit) = limit else { return wanted };
    let kept = (limit / KEPT_SHARE).clamp(KEPT_LEAST, KEPT_MOST);
    let left = usize::try_from(limit.saturating_sub(kept)).unwrap_or(usize::MAX);
    wanted.min(left.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_descriptors_for_the_rest() {
        assert_eq!(allowed(32_768, None), 32_768);
        assert_eq!(allowed(32_768, Some(1 << 20)), 32_768);
        assert_eq!(allowed(32_768, Some(20_000)), 19_744);
        assert_eq!(allowed(32_768, Some(1_024)), 896);
        assert_eq!(allowed(100, Some(1_024)), 100);
        assert_eq!(allowed(100, Some(64)), 32);
        assert_eq!(allowed(100, Some(8)), 1);
    }

    #[test]
    fn the_limit_is_raised_to_the_hard_one() {
        connections(1);
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
