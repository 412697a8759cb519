//! Long text a piece at a time: what works on it charges each piece, and lets go of its core in between.

use crate::prompt::jinja::budget::Budget;
use crate::prompt::jinja::error::Error;

/// Bytes of a piece: they are copied in some 20 us, with memory that nothing touched before.
pub(crate) const PIECE: usize = 64 << 10;

/// `text` in pieces of at most [`PIECE`] bytes and three more, on the boundaries of characters.
pub(crate) fn pieces(text: &str) -> TextPieces<'_> {
    TextPieces { rest: text }
}

/// What [`pieces`] gives.
pub(crate) struct TextPieces<'a> {
    rest: &'a str,
}

impl<'a> Iterator for TextPieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (piece, rest) = self.rest.split_at(boundary(self.rest, PIECE));
        self.rest = rest;
        Some(piece)
    }
}

impl<'a> DoubleEndedIterator for TextPieces<'a> {
    fn next_back(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let at = boundary(self.rest, self.rest.len().saturating_sub(PIECE));
        let at = if at == self.rest.len() { 0 } else { at }; // a last character of several bytes
        let (rest, piece) = self.rest.split_at(at);
        self.rest = rest;
        Some(piece)
    }
}

/// The first boundary of a character from `at` on.
pub(crate) fn boundary(text: &str, at: usize) -> usize {
    (at..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len())
}

/// How many characters `text` has.
pub(crate) fn count(text: &str, budget: &Budget) -> Result<usize, Error> {
    pieces(text).try_fold(0, |count, piece| {
        budget.bytes(piece.len())?;
        Ok(count + piece.chars().count())
    })
}

/// Where the character after the first `chars` begins, or the end of a text that has no more of them.
pub(crate) fn offset(text: &str, chars: usize, budget: &Budget) -> Result<usize, Error> {
    let (mut at, mut left) = (0, chars);
    for piece in pieces(text) {
        budget.bytes(piece.len())?;
        let here = piece.chars().count();
        if left < here {
            return Ok(at + piece.char_indices().nth(left).map_or(piece.len(), |(at, _)| at));
        }
        left -= here;
        at += piece.len();
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::jinja::budget::Limits;

    /// Texts whose characters lie across the ends of pieces.
    fn texts() -> Vec<String> {
        let around = (PIECE - 4)..(PIECE + 5);
        let mut texts = vec![String::new(), "a".to_owned(), "\u{1f600}".to_owned()];
        for len in around {
            for c in ["a", "\u{e9}", "\u{20ac}", "\u{1f600}"] {
                texts.push(format!("{}{c}{}", "a".repeat(len), c.repeat(3)));
                texts.push(c.repeat(len));
            }
        }
        texts
    }

    #[test]
    fn pieces_are_the_text_from_either_end() {
        for text in texts() {
            assert_eq!(pieces(&text).collect::<String>(), text);
            let mut back: Vec<&str> = pieces(&text).rev().collect();
            back.reverse();
            assert_eq!(back.concat(), text);
            for piece in pieces(&text).chain(pieces(&text).rev()) {
                assert!((1..=PIECE + 3).contains(&piece.len()), "{}", piece.len());
            }
        }
    }

    #[test]
    fn counts_and_offsets_are_those_of_the_whole_text() {
        let budget = Budget::new(Limits { work: u64::MAX, ..Limits::of(0) });
        for text in texts() {
            let chars = text.chars().count();
            assert_eq!(count(&text, &budget).unwrap(), chars);
            for n in [0, 1, PIECE - 2, PIECE - 1, PIECE, PIECE + 1, chars, chars + 1] {
                let at = text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
                assert_eq!(offset(&text, n, &budget).unwrap(), at, "{n} of {chars}");
            }
        }
    }

    #[test]
    fn every_piece_is_charged() {
        let budget = Budget::new(Limits { work: PIECE as u64, ..Limits::of(0) });
        let text = "a".repeat(3 * PIECE);
        assert!(count(&text[..PIECE], &budget).is_ok());
        assert!(count(&text, &budget).is_err());
        let budget = Budget::new(Limits { work: PIECE as u64, ..Limits::of(0) });
        assert!(offset(&text, PIECE, &budget).is_ok(), "what lies behind is not looked at");
        assert!(offset(&text, 3 * PIECE, &budget).is_err());
    }
}
