//! What the log was told of dials that came to nothing: the same of the same worker once a minute. Somebody who dials
//! again every second for days would otherwise fill it. Each of them is counted in `headrace_link_errors_total`.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::net::lobby::Origin;

/// A guess: whoever looks at the log sees that it goes on, and sees other lines as well.
const AGAIN: Duration = Duration::from_secs(60);
/// Lines that are remembered. Strangers may have any number of names; beyond this many, lines repeat.
const MOST: usize = 1_024;

/// Who dialled, under which name if it gave one, and why it did not join.
type Line = (Origin, Option<String>, String);

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Told(HashMap<Line, Instant>);

impl Told {
    /// True if this is to be said; from then on it was.
    pub(super) fn is_news(&mut self, line: Line, now: Instant) -> bool {
        if self.0.get(&line).is_some_and(|last| now - *last < AGAIN) {
            return false;
        }
        if self.0.len() >= MOST {
            self.0.retain(|_, last| now - *last < AGAIN);
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(line, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(worker: &str) -> Line {
        (Origin::User(Some(1)), Some(worker.into()), "refused_name_taken".into())
    }

    #[test]
    fn the_same_is_said_once_a_minute_and_anything_else_at_once() {
        let (mut told, begin) = (Told::default(), Instant::now());
        assert!(told.is_news(line("w"), begin));
        assert!(!told.is_news(line("w"), begin + AGAIN / 2));
        assert!(told.is_news(line("other"), begin + AGAIN / 2));
        let other_reason = (Origin::User(Some(1)), Some("w".into()), "refused_circuit".into());
        assert!(told.is_news(other_reason, begin + AGAIN / 2));
        assert!(told.is_news(line("w"), begin + AGAIN));
        assert!(!told.is_news(line("w"), begin + AGAIN));
    }

    #[test]
    fn any_number_of_names_takes_bounded_room() {
        let (mut told, now) = (Told::default(), Instant::now());
        for n in 0..3 * MOST {
            assert!(told.is_news(line(&n.to_string()), now));
            assert!(told.0.len() <= MOST);
        }
    }
}
