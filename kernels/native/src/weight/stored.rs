//! Memory of weights: this process's own, or lent by whoever has them mapped from a file that processes share.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Elements that stay where and what they are for as long as this is held.
pub type Lent<T> = Arc<dyn AsRef<[T]> + Send + Sync>;

/// Elements side by side.
pub(crate) enum Stored<T> {
    Own(Vec<T>),
    Lent(Lent<T>),
}

impl<T> Deref for Stored<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Own(own) => own,
            Self::Lent(lent) => (**lent).as_ref(),
        }
    }
}

impl<T: Clone> Stored<T> {
    /// To be changed: what was lent is copied first.
    pub(crate) fn own(&mut self) -> &mut Vec<T> {
        if let Self::Lent(lent) = self {
            *self = Self::Own((**lent).as_ref().to_vec());
        }
        match self {
            Self::Own(own) => own,
            Self::Lent(_) => unreachable!("it was copied"),
        }
    }
}

impl<T> fmt::Debug for Stored<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if matches!(self, Self::Own(_)) { "own" } else { "lent" };
        write!(f, "{} {whose} elements", self.len())
    }
}
