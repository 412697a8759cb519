//! Equality and order of values, charged for each value that is looked at.

use std::cmp::Ordering;

use crate::prompt::jinja::Machine;
use crate::prompt::jinja::error::Error;
use crate::prompt::jinja::value::{Value, ValueKind};

/// Two numbers brought to one type.
pub(crate) enum Pair {
    Ints(i128, i128),
    Floats(f64, f64),
}

/// As minijinja coerces operands; `exact` refuses integers that a float cannot hold.
pub(crate) fn coerce(a: &Value<'_>, b: &Value<'_>, exact: bool) -> Option<Pair> {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => Some(Pair::Floats(*a, *b)),
        (Value::Float(a), b) => Some(Pair::Floats(*a, as_float(b, exact)?)),
        (a, Value::Float(b)) => Some(Pair::Floats(as_float(a, exact)?, *b)),
        (a, b) => Some(Pair::Ints(whole(a)?, whole(b)?)),
    }
}

fn whole(value: &Value<'_>) -> Option<i128> {
    match value {
        Value::Bool(x) => Some(i128::from(*x)),
        Value::Int(x) => Some(x.get()),
        _ => None,
    }
}

pub(crate) fn as_float(value: &Value<'_>, exact: bool) -> Option<f64> {
    match value {
        Value::Bool(x) => Some(f64::from(u8::from(*x))),
        Value::Float(x) => Some(*x),
        Value::Int(x) => {
            let float = x.get() as f64;
            (!exact || float as i128 == x.get()).then_some(float)
        }
        _ => None,
    }
}

/// Equality of values without parts; texts are compared elsewhere.
pub(crate) fn scalars_equal(a: &Value<'_>, b: &Value<'_>) -> bool {
    match (a, b) {
        (Value::None, Value::None) | (Value::Undefined, Value::Undefined) => true,
        _ => match coerce(a, b, true) {
            Some(Pair::Ints(a, b)) => a == b,
            Some(Pair::Floats(a, b)) => a == b,
            None => false,
        },
    }
}

impl<'r> Machine<'r> {
    pub(crate) fn equal(&self, a: &Value<'r>, b: &Value<'r>) -> Result<bool, Error> {
        self.budget.items(1)?;
        if flat(a) || flat(b) {
            return self.equal_inside(a, b);
        }
        self.budget.down()?; // namespaces may hold each other
        let equal = self.equal_inside(a, b)?;
        self.budget.up();
        Ok(equal)
    }

    fn equal_inside(&self, a: &Value<'r>, b: &Value<'r>) -> Result<bool, Error> {
        if let (Some(a), Some(b)) = (a.as_text(), b.as_text()) {
            if a.len() != b.len() {
                return Ok(false);
            }
            self.budget.bytes(a.len())?;
            return Ok(*a.read() == *b.read());
        }
        if let (Some(a), Some(b)) = (a.as_list(), b.as_list()) {
            if a.is(b) {
                return Ok(true);
            }
            if a.len() != b.len() {
                return Ok(false);
            }
            for (a, b) in a.read().iter().zip(b.read().iter()) {
                if !self.equal(a, b)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        if self.same(a, b) {
            return Ok(true);
        }
        match (self.as_map(a)?, self.as_map(b)?) {
            (Some(a), Some(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (key, a) in a.iter() {
                    match b.get(key, &self.budget)? {
                        Some(b) if self.equal(a, &b)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
            (None, None) => Ok(scalars_equal(a, b)),
            _ => Ok(false),
        }
    }

    /// The very same object.
    pub(crate) fn same(&self, a: &Value<'r>, b: &Value<'r>) -> bool {
        match (a, b) {
            (Value::Map(a), Value::Map(b)) => std::rc::Rc::ptr_eq(a, b),
            (Value::List(a), Value::List(b)) | (Value::Lazy(a), Value::Lazy(b)) => a.is(b),
            (Value::Namespace(a), Value::Namespace(b)) | (Value::Loop(a), Value::Loop(b)) => a == b,
            (Value::Macro(a, c), Value::Macro(b, d)) => std::ptr::eq(*a, *b) && c == d,
            (Value::Function(a), Value::Function(b)) => a == b,
            _ => false,
        }
    }

    /// The order in which minijinja sorts: kinds first.
    pub(crate) fn order(&self, a: &Value<'r>, b: &Value<'r>) -> Result<Ordering, Error> {
        self.budget.items(1)?;
        if flat(a) || flat(b) {
            return self.order_inside(a, b);
        }
        self.budget.down()?;
        let order = self.order_inside(a, b)?;
        self.budget.up();
        Ok(order)
    }

    fn order_inside(&self, a: &Value<'r>, b: &Value<'r>) -> Result<Ordering, Error> {
        let kinds = a.kind().cmp(&b.kind());
        if kinds != Ordering::Equal {
            return Ok(kinds);
        }
        if let (Some(a), Some(b)) = (a.as_text(), b.as_text()) {
            self.budget.bytes(a.len().min(b.len()))?;
            return Ok(a.read().cmp(&b.read()));
        }
        if let (Some(a), Some(b)) = (a.as_list(), b.as_list()) {
            if a.is(b) {
                return Ok(Ordering::Equal);
            }
            for (a, b) in a.read().iter().zip(b.read().iter()) {
                let order = self.order(a, b)?;
                if order != Ordering::Equal {
                    return Ok(order);
                }
            }
            return Ok(a.len().cmp(&b.len()));
        }
        if self.same(a, b) {
            return Ok(Ordering::Equal);
        }
        if let (Some(a), Some(b)) = (self.as_map(a)?, self.as_map(b)?) {
            for ((key_a, a), (key_b, b)) in a.iter().zip(b.iter()) {
                let order = self.order(key_a, key_b)?.then(self.order(a, b)?);
                if order != Ordering::Equal {
                    return Ok(order);
                }
            }
            return Ok(a.len().cmp(&b.len()));
        }
        Ok(numbers(a, b))
    }
}

/// A value without parts.
fn flat(value: &Value<'_>) -> bool {
    value.kind() < ValueKind::Seq
}

fn numbers(a: &Value<'_>, b: &Value<'_>) -> Ordering {
    match coerce(a, b, true) {
        Some(Pair::Ints(a, b)) => a.cmp(&b),
        Some(Pair::Floats(a, b)) if a == b => Ordering::Equal,
        Some(Pair::Floats(a, b)) => a.total_cmp(&b),
        None => match coerce(a, b, false) {
            Some(Pair::Floats(x, y)) if x != y => x.total_cmp(&y),
            // One is a float, the other an integer that no float holds: compare as integers.
            Some(_) => match (a, b) {
                (Value::Float(a), Value::Int(b)) => (*a as i128).cmp(&b.get()),
                (Value::Int(a), Value::Float(b)) => a.get().cmp(&(*b as i128)),
                _ => Ordering::Equal,
            },
            None => Ordering::Equal,
        },
    }
}
