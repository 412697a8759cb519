//! Calls whose name stands before their arguments, which are JSON: those of DeepSeek, Kimi and Mistral.

use super::object::ObjectCalls;
use super::{Announcer, CallStep};
use crate::output::json::Json;
use crate::output::parts::Out;

/// How the name is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// `name<sep>{..}`, or of V3 `function<sep>name`, a line with three backticks and `json`, arguments, three backticks.
    Deepseek,
    /// `functions.name:0<|tool_call_argument_begin|>{..}`; all before the marker is the id.
    Kimi,
    /// `name{..}`, `name[ARGS]{..}` or `name[CALL_ID]id[ARGS]{..}`; or a list of objects.
    Mistral,
}

/// Between the kind and the name, or the name and the arguments.
pub(super) const DEEPSEEK_SEP: &str = "<｜tool▁sep｜>";
pub(super) const KIMI_SEP: &str = "<|tool_call_argument_begin|>";
const MISTRAL_ID: &str = "[CALL_ID]";
const MISTRAL_ARGUMENTS: &str = "[ARGS]";
pub(super) const MISTRAL_MARKERS: [&str; 2] = [MISTRAL_ID, MISTRAL_ARGUMENTS];
const FENCE: &str = "```json";
/// After the arguments, or in their place.
const DEEPSEEK_END: &str = "<｜tool▁call▁end｜>";
const KIMI_END: &str = "<|tool_call_end|>";

/// Longest head, its markers included. Names have at most 64 bytes.
const MAX_HEAD: usize = 256;

#[derive(Debug)]
pub(in crate::output) struct HeadedCall {
    head: Head,
    text: String,
    state: State,
    /// So many bytes of the marker that ends a call stand where its arguments should.
    end: usize,
}

#[derive(Debug)]
enum State {
    /// Up to the marker, or for Mistral up to the arguments.
    Name,
    /// After DeepSeek's marker: arguments, or a name.
    AfterSep,
    /// The name of V3, up to the end of its line.
    SecondName,
    /// Before arguments; `text` is the fence so far.
    Fence,
    Arguments(Json),
    /// After the arguments of V3: white space and so many backticks.
    Tail(usize),
    List(ObjectCalls),
}

impl HeadedCall {
    pub(super) fn new(head: Head) -> Self {
        Self { head, text: String::new(), state: State::Name, end: 0 }
    }

    pub(super) fn push(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        match &mut self.state {
            State::Name => self.name(c, calls, out),
            State::AfterSep => match c {
                '{' => self.begin(c, calls, out),
                c if c.is_ascii_whitespace() => CallStep::More,
                '<' => {
                    self.state = State::Fence;
                    self.fence(c, calls, out)
                }
                c => {
                    self.text.clear();
                    self.text.push(c);
                    self.state = State::SecondName;
                    CallStep::More
                }
            },
            State::SecondName => match c {
                '\n' | '`' | '<' => {
                    let name = self.text.trim();
                    if !calls.knows(name) {
                        return CallStep::Not;
                    }
                    self.state = State::Fence;
                    self.text = name.to_owned();
                    self.text.push('\n');
                    if c == '\n' { CallStep::More } else { self.fence(c, calls, out) }
                }
                '{' => self.begin(c, calls, out),
                c => self.head_goes_on(c),
            },
            State::Fence => self.fence(c, calls, out),
            State::Arguments(json) => {
                if json.push(c).is_err() {
                    return CallStep::Not;
                }
                let complete = json.is_complete();
                calls.argument(c, out);
                match (complete, self.head) {
                    (false, _) => CallStep::More,
                    (true, Head::Deepseek) => {
                        self.state = State::Tail(0);
                        CallStep::More
                    }
                    (true, Head::Kimi | Head::Mistral) => CallStep::Done,
                }
            }
            State::Tail(ticks) => match (c, *ticks) {
                ('`', 2) => CallStep::Done,
                ('`', _) => {
                    *ticks += 1;
                    CallStep::More
                }
                (c, 0) if c.is_ascii_whitespace() => CallStep::More,
                _ => CallStep::Not,
            },
            State::List(list) => list.push(c, calls, out),
        }
    }

    pub(super) fn held_bytes(&self) -> usize {
        let list = if let State::List(list) = &self.state { list.held_bytes() } else { 0 };
        self.text.capacity() + list
    }

    /// What followed the arguments of DeepSeek's and does not end them.
    pub(super) fn take_rest(&self) -> String {
        let ticks = if let State::Tail(ticks) = self.state { ticks } else { 0 };
        "`".repeat(ticks)
    }

    fn name(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        match (self.head, c) {
            (_, c) if c.is_ascii_whitespace() && self.text.is_empty() => return CallStep::More,
            (Head::Mistral, '[') if self.text.is_empty() => {
                self.state = State::List(ObjectCalls::listed(','));
                return CallStep::More;
            }
            (Head::Mistral, '{') => return self.begin(c, calls, out),
            _ => {}
        }
        let step = self.head_goes_on(c);
        if step == CallStep::More {
            match self.head {
                Head::Deepseek if self.text.ends_with(DEEPSEEK_SEP) => {
                    self.text.truncate(self.text.len() - DEEPSEEK_SEP.len());
                    self.state = State::AfterSep;
                }
                Head::Kimi if self.text.ends_with(KIMI_SEP) => self.state = State::Fence,
                Head::Deepseek | Head::Kimi | Head::Mistral => {}
            }
        }
        step
    }

    fn head_goes_on(&mut self, c: char) -> CallStep {
        self.text.push(c);
        if self.text.len() > MAX_HEAD { CallStep::Not } else { CallStep::More }
    }

    /// White space and DeepSeek's fence before the arguments, or the end of a call without any.
    fn fence(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        let end = if self.head == Head::Kimi { KIMI_END } else { DEEPSEEK_END };
        if end[self.end..].starts_with(c) {
            self.end += c.len_utf8();
            if self.end < end.len() {
                return CallStep::More;
            }
            return if self.announce("{}", calls, out) { CallStep::Done } else { CallStep::Not };
        }
        let fence = self.text.rfind('\n').map_or("", |at| &self.text[at + 1..]);
        match c {
            _ if self.end > 0 => CallStep::Not,
            '{' => self.begin(c, calls, out),
            c if c.is_ascii_whitespace() => CallStep::More,
            '`' if self.head == Head::Deepseek && fence == FENCE => {
                if !self.announce("{}", calls, out) {
                    return CallStep::Not;
                }
                self.state = State::Tail(1);
                CallStep::More
            }
            c if self.head == Head::Deepseek && FENCE[fence.len()..].starts_with(c) => {
                self.head_goes_on(c)
            }
            _ => CallStep::Not,
        }
    }

    /// The first character of the arguments.
    fn begin(&mut self, c: char, calls: &mut Announcer, out: &mut Out<'_>) -> CallStep {
        let mut json = Json::new();
        if json.push(c).is_err() || !self.announce("{", calls, out) {
            return CallStep::Not;
        }
        self.state = State::Arguments(json);
        CallStep::More
    }

    /// Announces the call with these arguments; false for a function that nobody offers.
    fn announce(&self, arguments: &str, calls: &mut Announcer, out: &mut Out<'_>) -> bool {
        let mut id = None;
        let name = match self.head {
            Head::Deepseek => self.text.lines().next().unwrap_or_default().trim(),
            Head::Kimi => {
                let whole = self.text.trim_end_matches(KIMI_SEP).trim();
                id = Some(whole);
                let name = whole.strip_prefix("functions.").unwrap_or(whole);
                name.rsplit_once(':').map_or(name, |(name, _)| name)
            }
            Head::Mistral => {
                let text = self.text.trim_end();
                let text = text.strip_suffix(MISTRAL_ARGUMENTS).unwrap_or(text);
                let (name, given) = text.split_once(MISTRAL_ID).unzip();
                id = given;
                name.unwrap_or(text).trim()
            }
        };
        let known = calls.knows(name);
        if known {
            calls.begin(name, id, out);
            calls.arguments(arguments, out);
        }
        known
    }
}
