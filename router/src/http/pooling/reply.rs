//! Bodies of answers that are made of vectors, written as the client takes them.

use bytes::BytesMut;

use super::vectors::Vectors;
use crate::http::parse::ids;
use crate::http::reply::events::{json, number};
use crate::http::reply::pieces::Parts;
use crate::limits::memory::MemoryShare;
use crate::request::Usage;

/// What stands around the list of an answer.
pub(super) struct ListHead {
    /// Begins the answer's id.
    pub(super) prefix: &'static str,
    /// Name of the list.
    pub(super) list: &'static str,
    pub(super) model: String,
    pub(super) usage: Usage,
}

/// A list, an item in each part.
pub(super) struct ListReply<I> {
    head: Option<ListHead>,
    /// The end of the body, once it has begun.
    end: Vec<u8>,
    items: std::iter::Enumerate<std::vec::IntoIter<I>>,
    write: fn(&mut BytesMut, usize, &I),
    _memory: MemoryShare,
}

impl<I> ListReply<I> {
    /// `write` appends the item at a place.
    pub(super) fn new(
        head: ListHead,
        items: Vec<I>,
        write: fn(&mut BytesMut, usize, &I),
        memory: MemoryShare,
    ) -> Self {
        let items = items.into_iter().enumerate();
        Self { head: Some(head), end: Vec::new(), items, write, _memory: memory }
    }
}

impl<I: Send + 'static> Parts for ListReply<I> {
    fn write(&mut self, out: &mut BytesMut) -> bool {
        if let Some(head) = self.head.take() {
            let ListHead { prefix, list, model, usage } = head;
            out.extend_from_slice(b"{\"id\":");
            json(out, &ids::name(prefix));
            out.extend_from_slice(b",\"object\":\"list\",\"created\":");
            json(out, &ids::unix_seconds());
            out.extend_from_slice(b",\"model\":");
            json(out, &model);
            let tokens = usage.prompt_tokens;
            let cached = usage.cached_tokens;
            out.extend_from_slice(format!(",\"usage\":{{\"prompt_tokens\":{tokens},\"total_tokens\":{tokens},\"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}},\"{list}\":[").as_bytes());
            self.end = b"]}".to_vec();
            return true;
        }
        if let Some((place, item)) = self.items.next() {
            if place > 0 {
                out.extend_from_slice(b",");
            }
            (self.write)(out, place, &item);
            return true;
        }
        out.extend_from_slice(&self.end);
        false
    }
}

/// The list of `/v1/embeddings`.
pub(super) fn embeddings(model: String, found: Vectors, base64: bool) -> ListReply<Vec<f32>> {
    let Vectors { list, usage, memory } = found;
    let head = ListHead { prefix: "embd-", list: "data", model, usage };
    let write: fn(&mut BytesMut, usize, &Vec<f32>) = if base64 {
        |out, place, vector| {
            embedding_head(out, place);
            out.extend_from_slice(b"\"");
            let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
            in_base64(out, &bytes);
            out.extend_from_slice(b"\"}");
        }
    } else {
        |out, place, vector| {
            embedding_head(out, place);
            json(out, vector);
            out.extend_from_slice(b"}");
        }
    };
    ListReply::new(head, list, write, memory)
}

fn embedding_head(out: &mut BytesMut, place: usize) {
    out.extend_from_slice(b"{\"object\":\"embedding\",\"index\":");
    index(out, place);
    out.extend_from_slice(b",\"embedding\":");
}

/// A document with its place in the request, its text where that is sent back, and its score.
pub(super) struct RankedDocument {
    pub(super) index: usize,
    pub(super) text: Option<String>,
    pub(super) score: f64,
}

pub(super) fn ranked(out: &mut BytesMut, _place: usize, document: &RankedDocument) {
    out.extend_from_slice(b"{\"index\":");
    index(out, document.index);
    if let Some(text) = &document.text {
        out.extend_from_slice(b",\"document\":{\"text\":");
        json(out, text);
        out.extend_from_slice(b"}");
    }
    out.extend_from_slice(b",\"relevance_score\":");
    json(out, &document.score);
    out.extend_from_slice(b"}");
}

pub(super) fn scored(out: &mut BytesMut, place: usize, score: &f64) {
    out.extend_from_slice(b"{\"index\":");
    index(out, place);
    out.extend_from_slice(b",\"object\":\"score\",\"score\":");
    json(out, score);
    out.extend_from_slice(b"}");
}

fn index(out: &mut BytesMut, place: usize) {
    number(out, u32::try_from(place).expect("texts were counted"));
}

/// Appends bytes in the base64 of RFC 4648, section 4, padded.
fn in_base64(out: &mut BytesMut, bytes: &[u8]) {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for three in bytes.chunks(3) {
        let byte = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let value = DIGITS[(bits >> (18 - 6 * digit) & 63) as usize];
            out.extend_from_slice(&[if digit <= three.len() { value } else { b'=' }]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_base64_are_those_of_the_standard() {
        for (bytes, want) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            let mut out = BytesMut::new();
            in_base64(&mut out, bytes.as_bytes());
            assert_eq!(out, want.as_bytes());
        }
        let mut out = BytesMut::new();
        in_base64(&mut out, &[0xfb, 0xff, 0xbf]);
        assert_eq!(&out[..], b"+/+/");
    }
}
