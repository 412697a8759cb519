//! Arithmetic, slices and containment. Every operator is minijinja's, but for slices with negative steps, which are Python's.

use super::budget::Budget;
use super::error::Error;
use super::library::args;
use super::scope::Machine;
use super::tree::Op;
use super::value::compare::{Pair, as_float, coerce};
use super::value::pieces::{self, PIECE, pieces};
use super::value::print;
use super::value::text::{Text, Writer};
use super::value::{self, List, Value, ValueKind};

/// Longest string that `*` makes, as in minijinja.
const MAX_REPEATED: usize = 100_000_000;

fn sign(op: Op) -> &'static str {
    match op {
        Op::Add => "+",
        Op::Sub => "-",
        Op::Mul => "*",
        Op::Div => "/",
        Op::FloorDiv => "//",
        Op::Rem => "%",
        Op::Pow => "**",
        Op::Concat => "~",
        Op::Compare(_) => "==",
    }
}

fn impossible(op: Op, a: &Value<'_>, b: &Value<'_>) -> Error {
    let (sign, a, b) = (sign(op), a.kind(), b.kind());
    Error::invalid(format!("tried to use {sign} operator on unsupported types {a} and {b}"))
}

pub(crate) fn calculate<'r>(
    machine: &Machine<'r>,
    op: Op,
    a: &Value<'r>,
    b: &Value<'r>,
) -> Result<Value<'r>, Error> {
    let budget = &machine.budget;
    match op {
        Op::Concat => {
            let (a, b) = (print::display(machine, a)?, print::display(machine, b)?);
            return Ok(Value::Text(a.append(&b, budget)?));
        }
        Op::Add => {
            if let (Some(a), Some(b)) = (a.as_text(), b.as_text()) {
                return Ok(Value::Text(a.append(b, budget)?));
            }
            if let (Some(a), Some(b)) = (a.as_list(), b.as_list()) {
                return Ok(Value::Lazy(a.append(b, budget)?));
            }
        }
        Op::Mul => {
            for (whole, n) in [(a, b), (b, a)] {
                if let Some(text) = whole.as_text() {
                    return repeat_text(machine, text, n);
                }
            }
            let (whole, n) = if a.kind() < ValueKind::Seq { (b, a) } else { (a, b) };
            if let Some(list) = whole.as_list() {
                return repeat_list(machine, list, n);
            }
        }
        Op::Sub | Op::Div | Op::FloorDiv | Op::Rem | Op::Pow | Op::Compare(_) => {}
    }
    numbers(op, a, b)
}

fn repeat_text<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    n: &Value<'r>,
) -> Result<Value<'r>, Error> {
    let n = n
        .as_usize()
        .ok_or_else(|| Error::invalid("strings can only be multiplied with integers"))?;
    let len = text.len().checked_mul(n).filter(|len| *len <= MAX_REPEATED);
    let len = len.ok_or_else(|| Error::invalid("repeated string is too large"))?;
    let read = text.read();
    let mut out = Writer::with_room(len, &machine.budget)?;
    // A short text is repeated up to a piece first, because each push costs something.
    let times = (PIECE / read.len().max(1)).clamp(1, n.max(1));
    let piece = read.repeat(times);
    for _ in 0..n / times {
        out.push(&piece)?;
    }
    out.push(&piece[..read.len() * (n % times)])?;
    Ok(Value::Text(out.finish()?))
}

fn repeat_list<'r>(
    machine: &Machine<'r>,
    list: &List<'r>,
    n: &Value<'r>,
) -> Result<Value<'r>, Error> {
    let why = "sequences and iterables can only be multiplied with integers";
    let n = n.as_usize().ok_or_else(|| Error::invalid(why))?;
    let len = list.len().saturating_mul(n);
    let items = list.read();
    let n = if items.is_empty() { 0 } else { n };
    let items = (0..n).flat_map(|_| items.iter().cloned());
    Value::lazy(value::collect(items, len, &machine.budget)?, &machine.budget)
}

fn numbers<'r>(op: Op, a: &Value<'r>, b: &Value<'r>) -> Result<Value<'r>, Error> {
    let pair = match op {
        Op::Div => as_float(a, false).zip(as_float(b, false)).map(|(a, b)| Pair::Floats(a, b)),
        _ => coerce(a, b, false),
    };
    match pair {
        Some(Pair::Ints(x, y)) => {
            let result = match op {
                Op::Add => x.checked_add(y),
                Op::Sub => x.checked_sub(y),
                Op::Mul => x.checked_mul(y),
                Op::FloorDiv => x.checked_div_euclid(y),
                Op::Rem => x.checked_rem_euclid(y),
                Op::Pow => u32::try_from(y).ok().and_then(|y| x.checked_pow(y)),
                Op::Div | Op::Concat | Op::Compare(_) => None,
            };
            result.map(Value::int).ok_or_else(|| {
                let (a, sign, b) = (print::number(a), sign(op), print::number(b));
                Error::invalid(format!("unable to calculate {a} {sign} {b}"))
            })
        }
        Some(Pair::Floats(x, y)) => Ok(Value::Float(match op {
            Op::Add => x + y,
            Op::Sub => x - y,
            Op::Mul => x * y,
            Op::Div => x / y,
            Op::FloorDiv => x.div_euclid(y),
            Op::Rem => x % y,
            Op::Pow => x.powf(y),
            Op::Concat | Op::Compare(_) => return Err(impossible(op, a, b)),
        })),
        None => Err(impossible(op, a, b)),
    }
}

pub(crate) fn negate<'r>(value: &Value<'r>) -> Result<Value<'r>, Error> {
    match value {
        Value::Float(x) => Ok(Value::Float(-x)),
        Value::Int(x) => {
            x.get().checked_neg().map(Value::int).ok_or_else(|| Error::invalid("overflow"))
        }
        _ => Err(Error::invalid("")),
    }
}

/// `needle in container`.
pub(crate) fn contains<'r>(
    machine: &Machine<'r>,
    container: &Value<'r>,
    needle: &Value<'r>,
) -> Result<bool, Error> {
    match container {
        Value::Undefined | Value::Function(_) => Ok(false),
        Value::Text(text) => {
            let needle = print::display(machine, needle)?;
            search(machine, text.len() + needle.len())?;
            Ok(text.read().contains(&*needle.read()))
        }
        Value::List(list) | Value::Lazy(list) => {
            for item in list.read().iter() {
                if machine.equal(item, needle)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Value::Map(_) | Value::Namespace(_) | Value::Loop(_) | Value::Macro(..) => {
            Ok(machine.item(container, needle)?.is_some())
        }
        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
            Err(Error::invalid("cannot perform a containment check on this value"))
        }
    }
}

/// Charges a search through so many bytes.
pub(crate) fn search(machine: &Machine<'_>, bytes: usize) -> Result<(), Error> {
    machine.budget.work(2 * bytes as u64)
}

/// The value of `whole[start:stop:step]`.
pub(crate) fn slice<'r>(
    machine: &Machine<'r>,
    whole: &Value<'r>,
    bounds: &[Value<'r>; 3],
) -> Result<Value<'r>, Error> {
    let bound = |value: &Value<'r>| match value {
        Value::None => Ok(None),
        value => args::signed(value).map(Some),
    };
    let [start, stop, step] = bounds;
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::invalid("cannot slice by step size of 0"));
    }
    match whole {
        Value::Undefined | Value::None => Value::list(Vec::new(), &machine.budget),
        Value::Text(text) => slice_text(machine, text, start, stop, step),
        Value::List(list) | Value::Lazy(list) => {
            let range = Range::new(start, stop, step, list.len());
            if step == 1 {
                return Ok(Value::Lazy(list.part(range.first, range.first + range.count)));
            }
            let items = range.indices().filter_map(|i| list.get(i));
            let items = value::collect(items, range.count, &machine.budget)?;
            Value::lazy(items, &machine.budget)
        }
        other => Err(Error::invalid(format!("value of type {} cannot be sliced", other.kind()))),
    }
}

fn slice_text<'r>(
    machine: &Machine<'r>,
    text: &Text<'r>,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> Result<Value<'r>, Error> {
    let budget = &machine.budget;
    let read = text.read();
    let range = Range::new(start, stop, step, pieces::count(&read, budget)?);
    if range.count == 0 {
        return Ok(Value::text(""));
    }
    if step == 1 {
        let from = pieces::offset(&read, range.first, budget)?;
        let to = from + pieces::offset(&read[from..], range.count, budget)?;
        return Ok(Value::Text(text.part(from, to)));
    }
    let mut stepped = Stepped::new(&range, budget);
    if step > 0 {
        pieces(&read).try_for_each(|piece| stepped.take(piece.len(), piece.chars()))?;
    } else {
        pieces(&read).rev().try_for_each(|piece| stepped.take(piece.len(), piece.chars().rev()))?;
    }
    Ok(Value::Text(stepped.out.finish()?))
}

/// The characters that a slice with a step takes, as they go by.
struct Stepped<'b> {
    out: Writer<'b>,
    /// How many go by before the next one is taken.
    skip: usize,
    every: usize,
    left: usize,
}

impl<'b> Stepped<'b> {
    fn new(range: &Range, budget: &'b Budget) -> Self {
        let skip = if range.step > 0 { range.first } else { range.len - 1 - range.first };
        let every = usize::try_from(range.step.unsigned_abs()).unwrap_or(usize::MAX);
        Self { out: Writer::new(budget), skip, every, left: range.count }
    }

    fn take(&mut self, bytes: usize, chars: impl Iterator<Item = char>) -> Result<(), Error> {
        self.out.budget().chars(bytes)?;
        for c in chars {
            match self.skip.checked_sub(1) {
                Some(skip) => self.skip = skip,
                None if self.left == 0 => break,
                None => {
                    self.out.push_char(c)?;
                    self.skip = self.every - 1;
                    self.left -= 1;
                }
            }
        }
        Ok(())
    }
}

/// The places that a slice takes from `len`: `count` of them, from `first` on, `step` apart.
struct Range {
    first: usize,
    count: usize,
    step: i64,
    len: usize,
}

impl Range {
    fn new(start: Option<i64>, stop: Option<i64>, step: i64, len: usize) -> Self {
        let end = i64::try_from(len).unwrap_or(i64::MAX);
        let (low, high) = if step > 0 { (0, end) } else { (-1, end - 1) };
        let place = |bound: i64| {
            let bound = if bound < 0 { bound.saturating_add(end) } else { bound };
            bound.clamp(low, high)
        };
        let start = start.map_or(if step > 0 { low } else { high }, place);
        let stop = stop.map_or(if step > 0 { high } else { low }, place);
        let distance = if step > 0 { stop - start } else { start - stop };
        let every = step.unsigned_abs();
        let count = u64::try_from(distance).unwrap_or(0).div_ceil(every);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        Self { first: usize::try_from(start).unwrap_or(0), count, step, len }
    }

    fn indices(&self) -> impl Iterator<Item = usize> {
        let (first, step) = (self.first as i64, self.step);
        (0..self.count).map(move |i| (first + i as i64 * step) as usize)
    }
}
