//! `strftime`, as chat templates call it.

use std::time::SystemTime;

use jiff::Timestamp;
use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use jiff::tz::TimeZone;

/// `datetime.strftime` in the C locale, in UTC: routers in different time zones must render the same prompt.
/// A directive that is unknown stays as it is.
pub(crate) fn strftime(format: &str, now: SystemTime) -> String {
    let now = Timestamp::try_from(now).unwrap_or_default(); // a clock after the year 9999 is a broken clock
    let now = BrokenDownTime::from(&now.to_zoned(TimeZone::UTC));
    let c_locale = Config::new().custom(PosixCustom::new()).lenient(true);
    now.to_string_with_config(&c_locale, format).expect("lenient formatting into memory succeeds")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(seconds))
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(at(0, "%A %d %b %Y %j %H:%M:%S %p"), "Thursday 01 Jan 1970 001 00:00:00 AM");
        assert_eq!(at(1_709_210_096, "%d %B %Y, %I:%M %p, %a"), "29 February 2024, 12:34 PM, Thu");
        assert_eq!(
            at(1_735_689_599, "%-d %-m %y %j %F %T %% %s"),
            "31 12 24 366 2024-12-31 23:59:59 % 1735689599"
        );
        assert_eq!(at(4_107_542_400, "%F"), "2100-03-01");
        assert_eq!(at(1_709_210_096, "%e %h %Z %z %X %x"), "29 Feb UTC +0000 12:34:56 02/29/24");
        assert_eq!(at(1_709_210_096, "%c"), "Thu Feb 29 12:34:56 2024");
    }

    #[test]
    fn no_format_fails_and_none_becomes_long() {
        for format in ["%!", "%", "%-", "%:", "%E", "é%é", "%-!", "%999d", "%\0", "100%"] {
            assert_eq!(at(0, format), format, "stays as it is");
        }
        for digits in ["", "20", "255"] {
            for directive in (0..128).map(char::from) {
                let format = format!("%{digits}{directive}");
                assert!(at(0, &format).len() <= 24.max(format.len()), "{format:?}");
            }
        }
    }

    #[test]
    fn a_broken_clock_breaks_no_prompt() {
        assert_eq!(at(u64::MAX / 4, "%Y"), "1970");
        assert_eq!(strftime("%Y", UNIX_EPOCH - Duration::from_secs(1)), "1969");
    }
}
