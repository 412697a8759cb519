//! Strings of a template: lent by the template or the request, or built. Appending to the newest one costs what is appended.

use std::cell::{Ref, RefCell};
use std::ops::Deref;
use std::rc::Rc;

use super::pieces::{PIECE, boundary, pieces};
use crate::prompt::jinja::budget::Budget;
use crate::prompt::jinja::error::Error;

/// A string that never changes.
///
/// Built ones are views of a buffer that only grows. So joining many pieces one by one (`text = text + piece`) is linear,
/// and a part of a string costs nothing.
#[derive(Debug, Clone)]
pub(crate) enum Text<'r> {
    Lent(&'r str),
    Built(View),
}

/// Bytes `start..end` of a buffer, on the boundaries of characters. Budgets are below 4 GiB.
#[derive(Debug, Clone)]
pub(crate) struct View {
    buffer: Rc<RefCell<String>>,
    start: u32,
    end: u32,
}

/// A string while it is looked at.
pub(crate) enum TextRef<'a> {
    Lent(&'a str),
    Built(Ref<'a, str>),
}

impl Deref for TextRef<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Lent(text) => text,
            Self::Built(text) => text,
        }
    }
}

/// Least room for a string that is put together.
const SHORT: usize = 128;

/// What a small buffer costs beside its bytes.
const BUFFER_BYTES: usize = 64;

impl<'r> Text<'r> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Lent(text) => text.len(),
            Self::Built(view) => (view.end - view.start) as usize,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn read(&self) -> TextRef<'_> {
        match self {
            Self::Lent(text) => TextRef::Lent(text),
            Self::Built(view) => TextRef::Built(Ref::map(view.buffer.borrow(), |text| {
                &text[view.start as usize..view.end as usize]
            })),
        }
    }

    /// Bytes `start..end` of this one, which are boundaries of characters.
    pub(crate) fn part(&self, start: usize, end: usize) -> Self {
        match self {
            Self::Lent(text) => Self::Lent(&text[start..end]),
            Self::Built(view) => Self::Built(View {
                buffer: Rc::clone(&view.buffer),
                start: view.start + start as u32,
                end: view.start + end as u32,
            }),
        }
    }

    /// `part` of `self`, where both were read from this string.
    pub(crate) fn part_of(&self, whole: &str, part: &str) -> Self {
        let start = part.as_ptr() as usize - whole.as_ptr() as usize;
        self.part(start, start + part.len())
    }

    /// A finished string. Whoever built it has charged its bytes.
    pub(crate) fn built(text: String, budget: &Budget) -> Result<Self, Error> {
        if text.is_empty() {
            return Ok(Self::Lent(""));
        }
        budget.memory(BUFFER_BYTES)?;
        let end = text.len() as u32;
        Ok(Self::Built(View { buffer: Rc::new(RefCell::new(text)), start: 0, end }))
    }

    /// This string and another one behind it.
    pub(crate) fn append(&self, more: &Self, budget: &Budget) -> Result<Self, Error> {
        if self.is_empty() {
            return Ok(more.clone());
        }
        if more.is_empty() {
            return Ok(self.clone());
        }
        if let Self::Built(view) = self
            && let Ok(mut buffer) = view.buffer.try_borrow_mut()
            && buffer.len() == view.end as usize
        {
            grow(&mut buffer, more.len(), budget)?;
            match more {
                Self::Built(same) if Rc::ptr_eq(&same.buffer, &view.buffer) => {
                    let (mut at, end) = (same.start as usize, same.end as usize);
                    while at < end {
                        let to = boundary(&buffer[..end], at + PIECE);
                        budget.bytes(to - at)?;
                        buffer.extend_from_within(at..to);
                        at = to;
                    }
                }
                _ => copy(&mut buffer, &more.read(), budget)?,
            }
            let end = buffer.len() as u32;
            return Ok(Self::Built(View { buffer: Rc::clone(&view.buffer), end, ..*view }));
        }
        // A short one is likely to go on.
        let capacity = (self.len() + more.len()).max(SHORT);
        budget.memory(capacity)?;
        let mut joined = String::with_capacity(capacity);
        copy(&mut joined, &self.read(), budget)?;
        copy(&mut joined, &more.read(), budget)?;
        Self::built(joined, budget)
    }
}

/// Makes room for `more` bytes: doubles, as `String` would, but charges first.
fn grow(text: &mut String, more: usize, budget: &Budget) -> Result<(), Error> {
    let needed = text.len() + more;
    if needed > text.capacity() {
        let capacity = needed.max(text.capacity().saturating_mul(2)).max(32);
        budget.memory(capacity)?;
        text.reserve_exact(capacity - text.len());
    }
    Ok(())
}

/// Adds `part` where there is room for it, charged piece by piece.
fn copy(text: &mut String, part: &str, budget: &Budget) -> Result<(), Error> {
    for piece in pieces(part) {
        budget.bytes(piece.len())?;
        text.push_str(piece);
    }
    Ok(())
}

/// Adds `part`, and makes room for it where there is none.
pub(crate) fn push(text: &mut String, part: &str, budget: &Budget) -> Result<(), Error> {
    grow(text, part.len(), budget)?;
    copy(text, part, budget)
}

/// A string under construction.
pub(crate) struct Writer<'b> {
    text: String,
    budget: &'b Budget,
}

impl<'b> Writer<'b> {
    pub(crate) fn new(budget: &'b Budget) -> Self {
        Self { text: String::new(), budget }
    }

    /// Makes room for exactly so many bytes.
    pub(crate) fn with_room(bytes: usize, budget: &'b Budget) -> Result<Self, Error> {
        budget.memory(bytes)?;
        Ok(Self { text: String::with_capacity(bytes), budget })
    }

    pub(crate) fn budget(&self) -> &'b Budget {
        self.budget
    }

    pub(crate) fn push(&mut self, part: &str) -> Result<(), Error> {
        push(&mut self.text, part, self.budget)
    }

    pub(crate) fn push_char(&mut self, c: char) -> Result<(), Error> {
        grow(&mut self.text, c.len_utf8(), self.budget)?;
        self.text.push(c);
        Ok(())
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.text.truncate(len);
    }

    pub(crate) fn finish<'r>(self) -> Result<Text<'r>, Error> {
        Text::built(self.text, self.budget)
    }
}
