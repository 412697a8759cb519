//! Where the spans of a request belong, in the texts of W3C's Trace Context: in the headers of clients, and on the wire.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Longest trace state that goes on, in bytes: what the standard has everybody pass on at least.
pub const MAX_TRACE_STATE_BYTES: usize = 512;

/// Most members of a trace state, by the standard.
const MOST_MEMBERS: usize = 32;
/// Of a state that is too long, members above this size are the first that go.
const LARGE_MEMBER_BYTES: usize = 128;
/// Of a key, and of a value.
const MEMBER_PART_BYTES: usize = 256;

/// The span that a leg's spans are under. The router sends it where it traces, of requests that are not sampled, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceContext {
    /// A `traceparent` of version 00.
    pub parent: TraceParent,
    /// A `tracestate`, which nobody here reads.
    pub state: Option<TraceState>,
}

/// A span, and whether its trace is kept. As text: `00-TRACE-SPAN-FLAGS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct TraceParent {
    /// Not all zeros.
    pub trace: [u8; 16],
    /// Not all zeros.
    pub span: [u8; 8],
    /// Spans are kept, so those under it are to be kept as well.
    pub sampled: bool,
}

/// The text is no `traceparent` that may be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no traceparent of W3C")]
pub struct NoTraceParent;

/// The text is no `tracestate` that may be passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no tracestate of W3C")]
pub struct NoTraceState;

impl TraceParent {
    /// The header of a client: also of a later version, which begins as version 00 does.
    ///
    /// # Errors
    /// It is nothing that may be followed.
    pub fn of_header(text: &str) -> Result<Self, NoTraceParent> {
        let (known, later) = text.as_bytes().split_at_checked(55).ok_or(NoTraceParent)?;
        let [version] = hex(&known[..2]).ok_or(NoTraceParent)?;
        let ends = if version == 0 { later.is_empty() } else { matches!(later, [] | [b'-', ..]) };
        if version == 0xff || !ends || [known[2], known[35], known[52]] != [b'-'; 3] {
            return Err(NoTraceParent);
        }
        let trace: [u8; 16] = hex(&known[3..35]).ok_or(NoTraceParent)?;
        let span: [u8; 8] = hex(&known[36..52]).ok_or(NoTraceParent)?;
        let [flags] = hex(&known[53..]).ok_or(NoTraceParent)?;
        if trace == [0; 16] || span == [0; 8] {
            return Err(NoTraceParent);
        }
        Ok(Self { trace, span, sampled: flags & 1 == 1 })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span) = (u128::from_be_bytes(self.trace), u64::from_be_bytes(self.span));
        write!(f, "00-{trace:032x}-{span:016x}-{:02x}", u8::from(self.sampled))
    }
}

impl FromStr for TraceParent {
    type Err = NoTraceParent;

    /// On the wire there is one form alone.
    fn from_str(text: &str) -> Result<Self, NoTraceParent> {
        let read = Self::of_header(text)?;
        let canonical = text.len() == 55 && matches!(&text[..3], "00-") && &text[53..54] == "0";
        if canonical && matches!(&text[54..], "0" | "1") { Ok(read) } else { Err(NoTraceParent) }
    }
}

impl From<TraceParent> for String {
    fn from(parent: TraceParent) -> Self {
        parent.to_string()
    }
}

impl TryFrom<String> for TraceParent {
    type Error = NoTraceParent;

    fn try_from(text: String) -> Result<Self, NoTraceParent> {
        text.parse()
    }
}

/// What other systems on the way keep of a trace: at most [`MAX_TRACE_STATE_BYTES`] of printable ASCII, and some.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct TraceState(Arc<str>);

impl TraceState {
    /// What of the headers of a client goes on: nothing where a member of it is none, and as many of its first members as
    /// there is room for.
    pub fn of_headers<'a>(values: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let members = values.into_iter().flat_map(|value| value.split(',')).map(str::trim);
        let mut members: Vec<&str> =
            members.filter(|member| !member.is_empty()).take(MOST_MEMBERS + 1).collect();
        if members.len() > MOST_MEMBERS || !members.iter().all(|member| is_member(member)) {
            return None;
        }
        let bytes = |members: &[&str]| members.iter().map(|member| member.len() + 1).sum::<usize>();
        if bytes(&members) > MAX_TRACE_STATE_BYTES + 1 {
            members.retain(|member| member.len() <= LARGE_MEMBER_BYTES);
        }
        while bytes(&members) > MAX_TRACE_STATE_BYTES + 1 {
            members.pop();
        }
        (!members.is_empty()).then(|| Self(members.join(",").into()))
    }

    /// As a header has it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TraceState {
    type Err = NoTraceState;

    /// As far as a reader looks who only passes it on.
    fn from_str(text: &str) -> Result<Self, NoTraceState> {
        let printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        let fits = (1..=MAX_TRACE_STATE_BYTES).contains(&text.len());
        if printable && fits { Ok(Self(text.into())) } else { Err(NoTraceState) }
    }
}

impl fmt::Display for TraceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<TraceState> for String {
    fn from(state: TraceState) -> Self {
        state.0.as_ref().to_owned()
    }
}

impl TryFrom<String> for TraceState {
    type Error = NoTraceState;

    fn try_from(text: String) -> Result<Self, NoTraceState> {
        text.parse()
    }
}

/// `key=value`.
fn is_member(text: &str) -> bool {
    let Some((key, value)) = text.split_once('=') else { return false };
    let in_key =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-*/@".contains(&byte);
    let in_value = |byte: u8| (b' '..=b'~').contains(&byte) && byte != b'=';
    let sized = |part: &str| (1..=MEMBER_PART_BYTES).contains(&part.len());
    sized(key) && sized(value) && key.bytes().all(in_key) && value.bytes().all(in_value)
}

/// Bytes by two lower-case digits each.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_is_read_and_written() {
        let read = TraceParent::of_header(PARENT).unwrap();
        assert_eq!((read.trace[0], read.span[7], read.sampled), (0x4b, 0xb7, true));
        assert_eq!(read.to_string(), PARENT);
        assert_eq!(PARENT.parse(), Ok(read));
    }

    #[test]
    fn flags_that_nobody_knows_are_not_passed_on() {
        for (flags, sampled) in [("00", false), ("02", false), ("03", true), ("ff", true)] {
            let text = format!("{}{flags}", &PARENT[..53]);
            let read = TraceParent::of_header(&text).unwrap();
            assert_eq!(read.sampled, sampled, "{flags}");
            assert_eq!(text.parse::<TraceParent>().is_ok(), flags == "00", "on the wire");
        }
    }

    #[test]
    fn a_later_version_is_read_as_far_as_it_is_known() {
        for (text, good) in [
            (format!("01{}", &PARENT[2..]), true),
            (format!("cc{}-what-comes", &PARENT[2..]), true),
            (format!("cc{}.what", &PARENT[2..]), false),
            (format!("{PARENT}-00"), false),
            (format!("{PARENT}-"), false),
            (format!("ff{}", &PARENT[2..]), false),
        ] {
            assert_eq!(TraceParent::of_header(&text).is_ok(), good, "{text}");
            assert!(text.parse::<TraceParent>().is_err(), "on the wire {text}");
        }
    }

    #[test]
    fn what_is_no_traceparent_is_not_followed() {
        let zeros = |n| "0".repeat(n);
        for text in [
            String::new(),
            "00".into(),
            PARENT[..54].into(),
            format!("{PARENT}0"),
            PARENT.to_uppercase(),
            PARENT.replace('4', "g"),
            PARENT.replace('-', "_"),
            format!(" {PARENT}"),
            format!("00-{}-00f067aa0ba902b7-01", zeros(32)),
            format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", zeros(16)),
            PARENT.replace("01", "é"),
            "é".repeat(55),
            "0".repeat(10_000),
        ] {
            assert!(TraceParent::of_header(&text).is_err(), "{text}");
            assert!(text.parse::<TraceParent>().is_err(), "{text}");
        }
    }

    fn state(values: &[&str]) -> Option<String> {
        TraceState::of_headers(values.iter().copied()).map(String::from)
    }

    #[test]
    fn a_trace_state_goes_on_as_it_is() {
        assert_eq!(state(&["a=1"]).as_deref(), Some("a=1"));
        assert_eq!(
            state(&["a=1 , b@c=x y", "", ",d/*_-=~"]).as_deref(),
            Some("a=1,b@c=x y,d/*_-=~")
        );
        assert_eq!(state(&[]), None);
        assert_eq!(state(&[" , "]), None);
        for wrong in ["a", "a=", "=1", "A=1", "a=é", "a=b=c", "a=\u{7f}", "a b=1"] {
            assert_eq!(state(&["ok=1", wrong]), None, "{wrong}");
        }
    }

    #[test]
    fn a_long_trace_state_loses_its_large_members_and_then_its_last() {
        let large = format!("large={}", "x".repeat(200));
        let small: Vec<String> = (0..10).map(|n| format!("k{n}={}", "y".repeat(47))).collect();
        let all = format!("{large},{}", small.join(","));
        assert_eq!(state(&[&all]), Some(small.join(",")), "509 bytes");
        let many: Vec<String> = (0..12).map(|n| format!("k{n}={}", "y".repeat(60))).collect();
        let kept = state(&[&many.join(",")]).unwrap();
        assert_eq!(kept, many[..8].join(","));
        assert!(kept.len() <= MAX_TRACE_STATE_BYTES && kept.parse::<TraceState>().is_ok());
        let most: Vec<String> = (0..32).map(|n| format!("k{n}=1")).collect();
        assert!(state(&[&most.join(",")]).is_some());
        assert_eq!(state(&[&most.join(","), "more=1"]), None);
    }

    #[test]
    fn on_the_wire_a_trace_state_is_short_and_printable() {
        assert!("anything".parse::<TraceState>().is_ok());
        for wrong in ["", "a\n", "é", &"x".repeat(513)] {
            assert!(wrong.parse::<TraceState>().is_err());
        }
    }
}
