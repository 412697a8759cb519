//! Takes the fields of a JSON object one by one, each with its type and range; what nobody took is unknown.
//!
//! A field that is `null` counts as absent: OpenAI's schema makes nearly every parameter nullable, and clients that
//! serialise whole structs send all of them.

pub(in crate::http) mod record;

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use self::record::AskedAs;
use crate::error::RouteError;
use crate::http::parse::ignored::IgnoredFields;

/// A wrong field: `param` is its path as the client would write it, such as `messages[2].role`.
pub(in crate::http) fn bad(param: impl Into<String>, message: impl Into<String>) -> RouteError {
    RouteError::BadRequest { param: Some(param.into()), message: message.into() }
}

/// A body wrong as a whole.
pub(in crate::http) fn bad_body(message: impl Into<String>) -> RouteError {
    RouteError::BadRequest { param: None, message: message.into() }
}

/// A parameter that would change the answer, were it not missing here.
pub(in crate::http) fn unsupported(param: impl Into<String>, why: &str) -> RouteError {
    let param = param.into();
    let message = format!("`{param}` is not supported: {why}");
    bad(param, message)
}

/// At most the first 64 characters: what clients send goes back to them, but not all of it.
pub(in crate::http) fn clip(text: &str) -> String {
    match text.char_indices().nth(64) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// The name of a value's type, with its article.
pub(in crate::http) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// `param` has the wrong type.
pub(in crate::http) fn wrong_type(
    param: impl Into<String>,
    wanted: &str,
    got: &Value,
) -> RouteError {
    let param = param.into();
    let message = format!("`{param}` must be {wanted}, not {}", kind(got));
    bad(param, message)
}

fn out_of_range<T: Display>(
    param: String,
    range: &RangeInclusive<T>,
    got: impl Display,
) -> RouteError {
    let message =
        format!("`{param}` must be between {} and {}, not {got}", range.start(), range.end());
    bad(param, message)
}

/// Fields among which looking at all names is faster than hashing one.
const FEW: usize = 16;

/// The fields of one object that were not taken yet.
#[derive(Debug)]
pub(in crate::http) struct Fields {
    /// Path of the object: empty for the body, otherwise such as `messages[2]`.
    at: String,
    rest: Map<String, Value>,
    /// Where is noted what changes nothing.
    ignored: IgnoredFields,
    /// A field that nobody knows may be noted rather than refused, if operators say so: what it would say cannot bind the
    /// answer by a part of something that is known.
    loose: bool,
}

impl Fields {
    /// The body.
    ///
    /// # Errors
    /// `BadRequest` if it is no object.
    pub(in crate::http) fn of_body(value: Value) -> Result<Self, RouteError> {
        let Value::Object(rest) = value else {
            return Err(bad_body(format!("the body must be a JSON object, not {}", kind(&value))));
        };
        Ok(Self { at: String::new(), rest, ignored: IgnoredFields::default(), loose: true })
    }

    /// An object inside the body.
    ///
    /// # Errors
    /// `BadRequest` if it is no object.
    pub(in crate::http) fn of(value: Value, at: String) -> Result<Self, RouteError> {
        let Value::Object(rest) = value else { return Err(wrong_type(at, "an object", &value)) };
        Ok(Self { at, rest, ignored: IgnoredFields::default(), loose: false })
    }

    /// Notes what changes nothing there, also of the objects inside.
    pub(in crate::http) fn noting(mut self, ignored: &IgnoredFields) -> Self {
        self.ignored = ignored.clone();
        self
    }

    /// Of an object in the body that only says how the answer is sent.
    pub(in crate::http) fn loose(self) -> Self {
        Self { loose: true, ..self }
    }

    /// Takes note that a field changes nothing.
    pub(in crate::http) fn ignore(&self, name: &str) {
        self.ignored.note(self.path(&clip(name)));
    }

    /// Puts a field in its place, whatever stood there.
    pub(in crate::http) fn put(&mut self, name: &str, value: Value) {
        self.rest.insert(name.to_owned(), value);
    }

    /// Full path of a field of this object.
    pub(in crate::http) fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    /// A field of any type; `None` if absent or `null`.
    pub(in crate::http) fn take(&mut self, name: &str) -> Option<Value> {
        self.note(name, AskedAs::Any);
        self.remove(name)
    }

    /// One that is refused unless it would do nothing.
    pub(in crate::http) fn take_missing(&mut self, name: &str) -> Option<Value> {
        self.remove(name)
    }

    fn remove(&mut self, name: &str) -> Option<Value> {
        // Most of some forty fields of a request are absent: no hash is made for them.
        if self.rest.len() <= FEW && self.rest.keys().all(|key| key != name) {
            return None;
        }
        self.rest.remove(name).filter(|value| !value.is_null())
    }

    /// Leaves word for the test that compares what is read with what is documented.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests record it"))]
    fn note(&self, name: &str, asked: AskedAs) {
        #[cfg(test)]
        record::note(self.path(name), asked);
        #[cfg(not(test))]
        let _ = (name, asked);
    }

    /// A field that stays; `None` if absent or `null`.
    pub(in crate::http) fn look(&self, name: &str) -> Option<&Value> {
        self.rest.get(name).filter(|value| !value.is_null())
    }

    /// True if a field is there and says something.
    pub(in crate::http) fn has(&self, name: &str) -> bool {
        self.rest.get(name).is_some_and(|value| !value.is_null())
    }

    /// What `take` gave, or an error that says that it must be there.
    pub(in crate::http) fn require<T>(
        &self,
        name: &str,
        value: Option<T>,
    ) -> Result<T, RouteError> {
        value.ok_or_else(|| {
            let path = self.path(name);
            let message = format!("`{path}` is required");
            bad(path, message)
        })
    }

    pub(in crate::http) fn boolean(&mut self, name: &str) -> Result<Option<bool>, RouteError> {
        self.note(name, AskedAs::Boolean);
        match self.remove(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(self.path(name), "a boolean", &other)),
        }
    }

    pub(in crate::http) fn string(&mut self, name: &str) -> Result<Option<String>, RouteError> {
        self.note(name, AskedAs::Text);
        match self.remove(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(self.path(name), "a string", &other)),
        }
    }

    pub(in crate::http) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, RouteError> {
        self.note(name, AskedAs::Array);
        match self.remove(name) {
            None => Ok(None),
            Some(Value::Array(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(self.path(name), "an array", &other)),
        }
    }

    pub(in crate::http) fn object(&mut self, name: &str) -> Result<Option<Self>, RouteError> {
        self.note(name, AskedAs::Object);
        let inside = self.remove(name).map(|value| Self::of(value, self.path(name))).transpose()?;
        Ok(inside.map(|inside| inside.noting(&self.ignored)))
    }

    pub(in crate::http) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, RouteError> {
        self.note(name, AskedAs::Integer(*range.start(), *range.end()));
        self.remove(name).map(|value| integer(&value, self.path(name), &range)).transpose()
    }

    /// An integer whose range is that of `u32` from `min` on.
    pub(in crate::http) fn count(
        &mut self,
        name: &str,
        min: u32,
    ) -> Result<Option<u32>, RouteError> {
        let value = self.integer(name, i64::from(min)..=i64::from(u32::MAX))?;
        Ok(value.map(|value| u32::try_from(value).expect("range was checked")))
    }

    pub(in crate::http) fn number(
        &mut self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, RouteError> {
        self.note(name, AskedAs::Number(*range.start(), *range.end()));
        self.remove(name).map(|value| number(&value, self.path(name), &range)).transpose()
    }

    /// Everything that was not taken.
    pub(in crate::http) fn into_rest(self) -> Map<String, Value> {
        self.rest
    }

    /// Ends the check of this object.
    ///
    /// # Errors
    /// `BadRequest` naming a field that nobody took, unless such fields are to be noted. In objects inside the body they are
    /// refused in any case: a constraint without one of its parts is another one. A `null` one says nothing and passes.
    pub(in crate::http) fn finish(self) -> Result<(), RouteError> {
        for (name, _) in self.rest.iter().filter(|(_, value)| !value.is_null()) {
            if !(self.loose && self.ignored.unknown_pass()) {
                let path = self.path(&clip(name));
                let message = format!("unrecognized request argument: `{path}`");
                return Err(bad(path, message));
            }
            self.ignore(name);
        }
        Ok(())
    }
}

/// `value` as an integer within `range`.
///
/// # Errors
/// `BadRequest` about `param`.
pub(in crate::http) fn integer(
    value: &Value,
    param: String,
    range: &RangeInclusive<i64>,
) -> Result<i64, RouteError> {
    let Value::Number(got) = value else { return Err(wrong_type(param, "an integer", value)) };
    match got.as_i64() {
        Some(integer) if range.contains(&integer) => Ok(integer),
        None if got.is_f64() && got.as_f64().is_some_and(|float| float.fract() != 0.0) => {
            let message = format!("`{param}` must be an integer, not {got}");
            Err(bad(param, message))
        }
        // A whole number that is written as a float (`16.0`, or `1e30`, which no range contains).
        None => match got.as_f64() {
            #[expect(clippy::cast_possible_truncation, reason = "the range was checked as floats")]
            #[expect(
                clippy::cast_precision_loss,
                reason = "bounds only, and 2^53 is beyond any exact one"
            )]
            Some(float)
                if float.abs() < 9.0e15
                    && (*range.start() as f64..=*range.end() as f64).contains(&float) =>
            {
                Ok(float as i64)
            }
            _ => Err(out_of_range(param, range, got)),
        },
        Some(_) => Err(out_of_range(param, range, got)),
    }
}

/// `value` as a number within `range`.
///
/// # Errors
/// `BadRequest` about `param`.
pub(in crate::http) fn number(
    value: &Value,
    param: String,
    range: &RangeInclusive<f64>,
) -> Result<f64, RouteError> {
    let Value::Number(got) = value else { return Err(wrong_type(param, "a number", value)) };
    match got.as_f64() {
        Some(float) if range.contains(&float) => Ok(float),
        _ => Err(out_of_range(param, range, got)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::of_body(value).unwrap()
    }

    fn message<T: std::fmt::Debug>(result: Result<T, RouteError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_field_has_its_type_or_names_itself() {
        let mut body = fields(json!({"a": "x", "b": 3, "c": null, "d": true}));
        assert_eq!(message(body.number("a", 0.0..=1.0)), "`a` must be a number, not a string");
        assert_eq!(message(body.integer("b", 0..=2)), "`b` must be between 0 and 2, not 3");
        assert_eq!(body.string("c").unwrap(), None);
        assert_eq!(message(body.finish()), "unrecognized request argument: `d`");
    }

    #[test]
    fn fields_are_found_among_few_and_among_many() {
        for count in [1, FEW - 1, FEW, FEW + 1, 3 * FEW] {
            let all = (0..count).map(|i| (format!("f{i}"), json!(i)));
            let mut body = fields(Value::Object(all.collect()));
            for i in (0..count).rev() {
                assert_eq!(body.take("f"), None);
                assert_eq!(body.take(&format!("f{i}")), Some(json!(i)));
                assert_eq!(body.take(&format!("f{i}")), None);
            }
            assert!(body.finish().is_ok());
        }
    }

    #[test]
    fn integers_may_be_written_as_whole_floats_only() {
        for (value, want) in [(json!(16.0), Some(16)), (json!(1.5), None), (json!(1e30), None)] {
            assert_eq!(fields(json!({"a": value})).integer("a", 0..=100).ok().flatten(), want);
        }
        assert!(fields(json!({"a": u64::MAX})).integer("a", i64::MIN..=i64::MAX).is_err());
    }

    #[test]
    fn nested_fields_carry_their_path() {
        let mut inner = Fields::of(json!({"role": 1}), "messages[2]".into()).unwrap();
        assert_eq!(
            message(inner.string("role")),
            "`messages[2].role` must be a string, not a number"
        );
    }

    #[test]
    fn what_nobody_knows_is_noted_in_the_body_alone_and_in_what_only_says_how_to_send() {
        let ignored = IgnoredFields::new(true);
        let mut body =
            fields(json!({"a": 1, "b": {"c": 1}, "d": {"e": {"f": 2}}})).noting(&ignored);
        body.object("b").unwrap().unwrap().loose().finish().unwrap();
        let mut inner = body.object("d").unwrap().unwrap();
        let innermost = inner.object("e").unwrap().unwrap();
        assert_eq!(message(innermost.finish()), "unrecognized request argument: `d.e.f`");
        body.finish().unwrap();
        assert_eq!(ignored.header().unwrap(), "a, b.c");
    }

    #[test]
    fn long_names_are_clipped() {
        let name = "x".repeat(1_000_000);
        assert!(message(fields(json!({ name: 1 })).finish()).len() < 120);
    }
}
