//! JSON character by character: whether a text is still the beginning of a value, and where the value ends.

/// Objects and lists within each other, at most: those of a model's arguments have a few.
const MAX_DEPTH: u32 = 64;

/// What is left of the word after its first letter.
const INFINITY: &str = "nfinity";

/// One value, as far as it has come. It takes a few bytes, however long the value is.
#[derive(Debug, Clone)]
pub(super) struct Json {
    /// One bit for each open object (1) or list (0), the innermost lowest.
    open: u64,
    depth: u32,
    want: Want,
}

/// What may come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    Value,
    /// A value, or the end of a list.
    First,
    /// A key, or the end of an object.
    FirstKey,
    Key,
    Colon,
    /// A comma, or the end of what is open.
    After,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Hex {
        key: bool,
        left: u8,
    },
    Number(Digits),
    Word(&'static str),
    /// It is complete.
    Nothing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    Sign,
    Zero,
    Whole,
    Point,
    Fraction,
    PowerMark,
    PowerSign,
    Power,
}

/// No JSON goes on like this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoJson;

impl Json {
    pub(super) fn new() -> Self {
        Self { open: 0, depth: 0, want: Want::Value }
    }

    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    pub(super) fn want(&self) -> Want {
        self.want
    }

    /// An object or list was closed, and it was the whole value.
    pub(super) fn is_complete(&self) -> bool {
        self.want == Want::Nothing
    }

    /// The text so far is a number, which nothing but its end may make whole.
    pub(super) fn is_number(text: &str) -> bool {
        let mut json = Self::new();
        text.chars().all(|c| json.push(c).is_ok())
            && matches!(json.want, Want::Number(digits) if digits.may_end())
    }

    pub(super) fn push(&mut self, c: char) -> Result<(), NoJson> {
        self.want = match self.want {
            Want::Text { key } => match c {
                '"' if key => Want::Colon,
                '"' => self.ended(),
                '\\' => Want::Escape { key },
                '\0'..='\x1f' => return Err(NoJson),
                _ => Want::Text { key },
            },
            Want::Escape { key } => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => Want::Text { key },
                'u' => Want::Hex { key, left: 4 },
                _ => return Err(NoJson),
            },
            Want::Hex { key, left } if c.is_ascii_hexdigit() => match left {
                1 => Want::Text { key },
                _ => Want::Hex { key, left: left - 1 },
            },
            Want::Hex { .. } => return Err(NoJson),
            Want::Number(Digits::Sign) if c == 'I' => Want::Word(INFINITY),
            Want::Number(digits) => match digits.next(c) {
                Some(digits) => Want::Number(digits),
                None if digits.may_end() => {
                    self.want = self.ended();
                    return self.push(c);
                }
                None => return Err(NoJson),
            },
            Want::Word(rest) => match rest.strip_prefix(c) {
                Some("") => self.ended(),
                Some(rest) => Want::Word(rest),
                None => return Err(NoJson),
            },
            want if matches!(c, ' ' | '\n' | '\t' | '\r') => want,
            Want::First if c == ']' => self.close(false)?,
            Want::Value | Want::First => self.value(c)?,
            Want::FirstKey if c == '}' => self.close(true)?,
            Want::FirstKey | Want::Key if c == '"' => Want::Text { key: true },
            Want::FirstKey | Want::Key => return Err(NoJson),
            Want::Colon if c == ':' => Want::Value,
            Want::Colon => return Err(NoJson),
            Want::After => match c {
                ',' if self.open & 1 == 1 => Want::Key,
                ',' => Want::Value,
                '}' => self.close(true)?,
                ']' => self.close(false)?,
                _ => return Err(NoJson),
            },
            Want::Nothing => return Err(NoJson),
        };
        Ok(())
    }

    fn value(&mut self, c: char) -> Result<Want, NoJson> {
        Ok(match c {
            '{' | '[' => {
                if self.depth == MAX_DEPTH {
                    return Err(NoJson);
                }
                self.open = self.open << 1 | u64::from(c == '{');
                self.depth += 1;
                if c == '{' { Want::FirstKey } else { Want::First }
            }
            '"' => Want::Text { key: false },
            '-' => Want::Number(Digits::Sign),
            '0' => Want::Number(Digits::Zero),
            '1'..='9' => Want::Number(Digits::Whole),
            't' => Want::Word("rue"),
            'f' => Want::Word("alse"),
            'n' => Want::Word("ull"),
            // no JSON, but what Python writes and reads in its place
            'N' => Want::Word("aN"),
            'I' => Want::Word(INFINITY),
            _ => return Err(NoJson),
        })
    }

    fn close(&mut self, object: bool) -> Result<Want, NoJson> {
        if (self.open & 1 == 1) != object {
            return Err(NoJson);
        }
        self.open >>= 1;
        self.depth -= 1;
        Ok(self.ended())
    }

    fn ended(&self) -> Want {
        if self.depth == 0 { Want::Nothing } else { Want::After }
    }
}

impl Digits {
    fn next(self, c: char) -> Option<Self> {
        let digit = c.is_ascii_digit();
        match self {
            Self::Sign if c == '0' => Some(Self::Zero),
            Self::Sign | Self::Whole if digit => Some(Self::Whole),
            Self::Zero | Self::Whole if c == '.' => Some(Self::Point),
            Self::Zero | Self::Whole | Self::Fraction if matches!(c, 'e' | 'E') => {
                Some(Self::PowerMark)
            }
            Self::Point | Self::Fraction if digit => Some(Self::Fraction),
            Self::PowerMark if matches!(c, '+' | '-') => Some(Self::PowerSign),
            Self::PowerMark | Self::PowerSign | Self::Power if digit => Some(Self::Power),
            Self::Sign
            | Self::Zero
            | Self::Whole
            | Self::Point
            | Self::Fraction
            | Self::PowerMark
            | Self::PowerSign
            | Self::Power => None,
        }
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Whole | Self::Fraction | Self::Power)
    }
}

/// Appends a character of a JSON text, between its quotes.
pub(super) fn escape(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\0'..='\x1f' => {
            const HEX: &[u8; 16] = b"0123456789abcdef";
            let code = c as usize;
            out.push_str("\\u00");
            out.push(char::from(HEX[code >> 4]));
            out.push(char::from(HEX[code & 15]));
        }
        _ => out.push(c),
    }
}

/// What the characters between the quotes of a JSON text stand for, one by one.
#[derive(Debug, Clone, Default)]
pub(super) struct Unescape {
    /// The escape so far, without its backslash.
    escape: Option<String>,
    /// The first half of a pair that stands for one character.
    high: Option<u32>,
}

impl Unescape {
    /// Appends what is certain. The text has been checked by [`Json`].
    pub(super) fn push(&mut self, c: char, out: &mut String) {
        let Some(mut escape) = self.escape.take() else {
            if c == '\\' {
                self.escape = Some(String::new());
            } else {
                self.lone(out);
                out.push(c);
            }
            return;
        };
        escape.push(c);
        if let Some(digits) = escape.strip_prefix('u') {
            if digits.len() < 4 {
                self.escape = Some(escape);
                return;
            }
            return self.code(u32::from_str_radix(digits, 16).unwrap_or(0xfffd), out);
        }
        self.lone(out);
        out.push(match c {
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            other => other,
        });
    }

    fn code(&mut self, code: u32, out: &mut String) {
        match (self.high.take(), code) {
            (Some(high), 0xdc00..=0xdfff) => {
                let pair = 0x10000 + ((high - 0xd800) << 10) + (code - 0xdc00);
                out.push(char::from_u32(pair).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            (high, code) => {
                if high.is_some() {
                    out.push(char::REPLACEMENT_CHARACTER);
                }
                match code {
                    0xd800..=0xdbff => self.high = Some(code),
                    _ => out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)),
                }
            }
        }
    }

    /// The text has ended, perhaps with half of a pair.
    pub(super) fn finish(&mut self, out: &mut String) {
        self.lone(out);
    }

    fn lone(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes after which a value is complete, or what is wrong.
    fn ends(text: &str) -> Result<Option<usize>, usize> {
        let mut json = Json::new();
        for (at, c) in text.char_indices() {
            json.push(c).map_err(|NoJson| at)?;
            if json.is_complete() {
                return Ok(Some(at + c.len_utf8()));
            }
        }
        Ok(None)
    }

    #[test]
    fn a_value_ends_where_its_bracket_closes() {
        for (text, want) in [
            (r#"{"a": [1, -2.5e+3, {"b": "}\"\u00e9"}], "c": null} x"#, Ok(Some(50))),
            (r#"{}"#, Ok(Some(2))),
            (r#"[[], [0], true, false]"#, Ok(Some(22))),
            (r#"{"a": "ü"#, Ok(None)),
            (r#"{a: 1}"#, Err(1)),
            (r#"{"a": 01}"#, Err(7)),
            (r#"{"a": 1,}"#, Err(8)),
            (r#"[1}"#, Err(2)),
            (r#"{"a": tru}"#, Err(9)),
            ("[\"a\nb\"]", Err(3)),
            (r#"["\x"]"#, Err(3)),
            (r#"[1.]"#, Err(3)),
        ] {
            assert_eq!(ends(text), want, "{text}");
        }
        assert!(ends(&"[".repeat(64)).is_ok());
        assert_eq!(ends(&"[".repeat(65)), Err(64));
    }

    #[test]
    fn escapes_go_there_and_back() {
        let text = "a\"\\\n\r\t\u{1}ü\u{1f600}";
        let mut escaped = String::new();
        text.chars().for_each(|c| escape(c, &mut escaped));
        let want = serde_json::to_string(text).unwrap();
        assert_eq!(format!("\"{escaped}\""), want);
        for source in [&*escaped, r"\ud83d\ude00\u00fc\/\b\f\ud83dx\ude00"] {
            let (mut back, mut unescape) = (String::new(), Unescape::default());
            source.chars().for_each(|c| unescape.push(c, &mut back));
            let want =
                if source == escaped { text } else { "\u{1f600}ü/\u{8}\u{c}\u{fffd}x\u{fffd}" };
            assert_eq!(back, want);
        }
    }
}
