//! `strftime`, as chat templates call it.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `datetime.strftime` in the C locale, in UTC: routers in different time zones must render the same prompt.
/// Directives that templates do not use stay as they are.
pub(crate) fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[((days + 4) % 7) as usize]; // 1970-01-01 was a Thursday
    let day_of_year = days - days_before(year) + 1;
    let twelve = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next();
        let (pad, directive) = match directive {
            Some('-') => (false, chars.next()),
            other => (true, other),
        };
        let two = |n: u64| if pad { format!("{n:02}") } else { n.to_string() };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two(twelve),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('j') if pad => format!("{day_of_year:03}"),
            Some('j') => day_of_year.to_string(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T' | 'X') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('s') => seconds.to_string(),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{}{other}", if pad { "" } else { "-" }),
            None => "%".to_owned(),
        });
    }
    out
}

/// Year, month and day of the day that many days after 1970-01-01 (Gregorian calendar).
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366; // never too late, and at most one in 1,461 days too early per year
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut day = days - days_before(year);
    let leap = u64::from(days_before(year + 1) - days_before(year) == 366);
    let lengths = [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if day < length {
            return (year, month, day + 1);
        }
        day -= length;
    }
    unreachable!("the day is inside its year")
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let y = year - 1;
    y * 365 + y / 4 - y / 100 + y / 400 - 719_162
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |s: u64, f: &str| strftime(f, UNIX_EPOCH + Duration::from_secs(s));
        assert_eq!(at(0, "%A %d %b %Y %j %H:%M:%S %p"), "Thursday 01 Jan 1970 001 00:00:00 AM");
        assert_eq!(at(1_709_210_096, "%d %B %Y, %I:%M %p, %a"), "29 February 2024, 12:34 PM, Thu");
        assert_eq!(
            at(1_735_689_599, "%-d %-m %y %j %F %T %% %q"),
            "31 12 24 366 2024-12-31 23:59:59 % %q"
        );
        assert_eq!(at(4_107_542_400, "%F"), "2100-03-01");
    }
}
