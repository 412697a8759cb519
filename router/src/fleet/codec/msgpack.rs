//! The part of msgpack that frames use: nil, bool, integers, floats, strings, byte strings and arrays.
//!
//! Writing is canonical (shortest integers and lengths, floats in 64 bits), so equal frames have equal bytes. Reading
//! takes every width but never another kind: no integer for a float, no string for bytes, no map for a struct.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "the markers are fixed; a reader names those it takes"
)]

use std::fmt::Display;
use std::sync::Arc;

use rmp::{Marker, encode};

use crate::core::frame::{
    FailureKind, Finish, GrammarKind, Pooling, QueueRule, RefuseReason, RequestId, Role,
    TraceParent, TraceState, TransferBackend, TransferFailure, Word,
};
use crate::core::secret::PullKey;

/// What is wrong, and where inside the frame. Made on the error path only.
#[derive(Debug)]
pub(super) struct Fault {
    /// Such as `.outputs[3].ids`.
    pub(super) path: String,
    pub(super) kind: FaultKind,
}

#[derive(Debug)]
pub(super) enum FaultKind {
    Truncated,
    Malformed { expected: String, got: String },
}

pub(super) type Read<T> = Result<T, Box<Fault>>;

impl Fault {
    fn truncated() -> Box<Self> {
        Box::new(Self { path: String::new(), kind: FaultKind::Truncated })
    }

    pub(super) fn malformed(expected: impl Display, got: impl Display) -> Box<Self> {
        let mut got = got.to_string();
        if let Some((cut, _)) = got.char_indices().nth(80) {
            got.replace_range(cut.., "..."); // the peer chose it
        }
        let kind = FaultKind::Malformed { expected: expected.to_string(), got };
        Box::new(Self { path: String::new(), kind })
    }

    /// The same fault, seen from the struct around it.
    pub(super) fn inside(mut self: Box<Self>, field: &str) -> Box<Self> {
        self.path.insert_str(0, field);
        self.path.insert(0, '.');
        self
    }

    /// The same fault, seen from the array around it.
    pub(super) fn at(mut self: Box<Self>, index: usize) -> Box<Self> {
        self.path.insert_str(0, &format!("[{index}]"));
        self
    }
}

/// What can stand in a frame.
pub(super) trait Wire: Sized {
    /// No value is shorter. Bounds what a length can make us allocate.
    const MIN_BYTES: usize;

    fn write(&self, out: &mut Vec<u8>);
    fn read(reader: &mut BodyReader<'_>) -> Read<Self>;
}

/// What can stand in an array. Not `u8`, because `Vec<u8>` is a byte string.
pub(super) trait Item: Wire {
    /// No array has more of them.
    const MOST: usize = usize::MAX;
}

impl Item for i32 {}
impl Item for u32 {}
impl Item for String {}

/// The bytes that are not read yet.
pub(super) struct BodyReader<'a> {
    rest: &'a [u8],
}

impl<'a> BodyReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    /// The value that comes next, which stays there.
    pub(super) fn peek<T: Wire>(&self) -> Read<T> {
        T::read(&mut Self { rest: self.rest })
    }

    fn take(&mut self, n: usize) -> Read<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(n).ok_or_else(Fault::truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or_else(Fault::truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn marker(&mut self) -> Read<Marker> {
        Ok(Marker::from_u8(self.array::<1>()?[0]))
    }

    /// A length of as many bytes as its marker says.
    fn len8(&mut self) -> Read<usize> {
        Ok(usize::from(self.array::<1>()?[0]))
    }

    fn len16(&mut self) -> Read<usize> {
        Ok(usize::from(u16::from_be_bytes(self.array()?)))
    }

    fn len32(&mut self) -> Read<usize> {
        usize::try_from(u32::from_be_bytes(self.array()?)).map_err(|_| Fault::truncated())
    }

    /// Items of the array that begins here, at most one for each byte that is left.
    pub(super) fn array_len(&mut self) -> Read<usize> {
        let len = match self.marker()? {
            Marker::FixArray(len) => usize::from(len),
            Marker::Array16 => self.len16()?,
            Marker::Array32 => self.len32()?,
            other => return Err(unexpected("an array", other)),
        };
        if len > self.left() { Err(Fault::truncated()) } else { Ok(len) }
    }

    pub(super) fn str(&mut self) -> Read<&'a str> {
        let len = match self.marker()? {
            Marker::FixStr(len) => usize::from(len),
            Marker::Str8 => self.len8()?,
            Marker::Str16 => self.len16()?,
            Marker::Str32 => self.len32()?,
            other => return Err(unexpected("a string", other)),
        };
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|error| Fault::malformed("UTF-8", error))
    }

    fn bin(&mut self) -> Read<&'a [u8]> {
        let len = match self.marker()? {
            Marker::Bin8 => self.len8()?,
            Marker::Bin16 => self.len16()?,
            Marker::Bin32 => self.len32()?,
            other => return Err(unexpected("bytes", other)),
        };
        self.take(len)
    }

    /// An integer that fits `T`, whatever its width here.
    fn int<T: TryFrom<u64> + TryFrom<i64>>(&mut self, expected: &str) -> Read<T> {
        let unsigned =
            |value: u64| T::try_from(value).map_err(|_| Fault::malformed(expected, value));
        let signed = |value: i64| T::try_from(value).map_err(|_| Fault::malformed(expected, value));
        match self.marker()? {
            Marker::FixPos(value) => unsigned(value.into()),
            Marker::U8 => unsigned(u8::from_be_bytes(self.array()?).into()),
            Marker::U16 => unsigned(u16::from_be_bytes(self.array()?).into()),
            Marker::U32 => unsigned(u32::from_be_bytes(self.array()?).into()),
            Marker::U64 => unsigned(u64::from_be_bytes(self.array()?)),
            Marker::FixNeg(value) => signed(value.into()),
            Marker::I8 => signed(i8::from_be_bytes(self.array()?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.array()?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.array()?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.array()?)),
            other => Err(unexpected(expected, other)),
        }
    }
}

fn unexpected(expected: &str, marker: Marker) -> Box<Fault> {
    let got = match marker {
        Marker::Null => "nil",
        Marker::True | Marker::False => "a bool",
        Marker::FixPos(_)
        | Marker::FixNeg(_)
        | Marker::U8
        | Marker::U16
        | Marker::U32
        | Marker::U64
        | Marker::I8
        | Marker::I16
        | Marker::I32
        | Marker::I64 => "an integer",
        Marker::F32 | Marker::F64 => "a float",
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => "a string",
        Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => "bytes",
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => "an array",
        Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => "a map",
        Marker::FixExt1
        | Marker::FixExt2
        | Marker::FixExt4
        | Marker::FixExt8
        | Marker::FixExt16
        | Marker::Ext8
        | Marker::Ext16
        | Marker::Ext32 => "an extension",
        Marker::Reserved => "the reserved byte",
    };
    Fault::malformed(expected, got)
}

/// Writing to memory cannot fail.
fn sure<T, E: std::fmt::Debug>(written: Result<T, E>) {
    written.expect("a Vec takes every byte");
}

/// A length beyond 32 bits makes the frame too long anyway; `encode` refuses it.
fn len32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

pub(super) fn put_array_len(out: &mut Vec<u8>, len: usize) {
    sure(encode::write_array_len(out, len32(len)));
}

pub(super) fn put_uint(out: &mut Vec<u8>, value: u64) {
    sure(encode::write_uint(out, value));
}

pub(super) fn put_nil(out: &mut Vec<u8>) {
    sure(encode::write_nil(out));
}

fn put_str(out: &mut Vec<u8>, text: &str) {
    sure(encode::write_str_len(out, len32(text.len())));
    out.extend_from_slice(text.as_bytes());
}

macro_rules! unsigned {
    ($($int:ident $expected:literal)*) => {$(
        impl Wire for $int {
            const MIN_BYTES: usize = 1;

            fn write(&self, out: &mut Vec<u8>) {
                put_uint(out, (*self).into());
            }

            fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
                reader.int($expected)
            }
        }
    )*};
}

unsigned! { u8 "an integer of 8 bits" u16 "an integer of 16 bits" u32 "an integer of 32 bits" u64 "an integer of 64 bits" }

macro_rules! signed {
    ($($int:ident $expected:literal)*) => {$(
        impl Wire for $int {
            const MIN_BYTES: usize = 1;

            fn write(&self, out: &mut Vec<u8>) {
                sure(encode::write_sint(out, (*self).into()));
            }

            fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
                reader.int($expected)
            }
        }
    )*};
}

signed! { i8 "a signed integer of 8 bits" i32 "a signed integer of 32 bits" }

impl Wire for RequestId {
    const MIN_BYTES: usize = 1;

    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        u64::read(reader).map(Self)
    }
}

macro_rules! words {
    ($($name:ident)*) => {$(
        impl Wire for $name {
            const MIN_BYTES: usize = 1;

            fn write(&self, out: &mut Vec<u8>) {
                put_str(out, self.as_str());
            }

            fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
                word(reader.str()?)
            }
        }
    )*};
}

words! { FailureKind Finish GrammarKind Pooling QueueRule RefuseReason Role TransferBackend TransferFailure }

fn word<T: Word>(text: &str) -> Read<T> {
    T::named(text).ok_or_else(|| {
        let words: Vec<_> = T::ALL.iter().map(|known| known.as_str()).collect();
        let (last, others) = words.split_last().expect("no enum is empty");
        let expected = format!("{} or {last}", others.join(", "));
        Fault::malformed(expected, format_args!("{text:?}"))
    })
}

macro_rules! texts {
    ($($name:ident $expected:literal)*) => {$(
        impl Wire for $name {
            const MIN_BYTES: usize = 1;

            fn write(&self, out: &mut Vec<u8>) {
                put_str(out, &self.to_string());
            }

            fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
                let text = reader.str()?;
                text.parse().map_err(|_| Fault::malformed($expected, format_args!("{text:?}")))
            }
        }
    )*};
}

texts! { TraceParent "a traceparent" TraceState "a tracestate" }

impl Wire for bool {
    const MIN_BYTES: usize = 1;

    fn write(&self, out: &mut Vec<u8>) {
        sure(encode::write_bool(out, *self));
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        match reader.marker()? {
            Marker::True => Ok(true),
            Marker::False => Ok(false),
            other => Err(unexpected("a bool", other)),
        }
    }
}

impl Wire for f64 {
    const MIN_BYTES: usize = 5;

    fn write(&self, out: &mut Vec<u8>) {
        sure(encode::write_f64(out, *self));
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        match reader.marker()? {
            Marker::F64 => Ok(Self::from_be_bytes(reader.array()?)),
            Marker::F32 => Ok(f32::from_be_bytes(reader.array()?).into()),
            other => Err(unexpected("a float", other)),
        }
    }
}

impl Wire for String {
    const MIN_BYTES: usize = 1;

    fn write(&self, out: &mut Vec<u8>) {
        put_str(out, self);
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        reader.str().map(str::to_owned)
    }
}

impl Wire for Arc<str> {
    const MIN_BYTES: usize = 1;

    fn write(&self, out: &mut Vec<u8>) {
        put_str(out, self);
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        reader.str().map(Self::from)
    }
}

impl<T: Wire> Wire for Box<T> {
    const MIN_BYTES: usize = T::MIN_BYTES;

    fn write(&self, out: &mut Vec<u8>) {
        T::write(self, out);
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        T::read(reader).map(Self::new)
    }
}

impl Wire for Vec<u8> {
    const MIN_BYTES: usize = 2;

    fn write(&self, out: &mut Vec<u8>) {
        sure(encode::write_bin_len(out, len32(self.len())));
        out.extend_from_slice(self);
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        reader.bin().map(<[u8]>::to_vec)
    }
}

impl Wire for PullKey {
    const MIN_BYTES: usize = 2 + size_of::<Self>();

    fn write(&self, out: &mut Vec<u8>) {
        sure(encode::write_bin_len(out, len32(self.0.len())));
        out.extend_from_slice(&self.0);
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        let bytes = reader.bin()?;
        let key = bytes.try_into().map(Self); // a fault names no more of it than its length
        key.map_err(|_| Fault::malformed(format_args!("{} bytes", size_of::<Self>()), bytes.len()))
    }
}

impl<T: Item> Wire for Vec<T> {
    const MIN_BYTES: usize = 1;

    fn write(&self, out: &mut Vec<u8>) {
        put_array_len(out, self.len());
        for item in self {
            item.write(out);
        }
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        let len = reader.array_len()?;
        if len > reader.left() / T::MIN_BYTES {
            return Err(Fault::truncated());
        }
        if len > T::MOST {
            return Err(Fault::malformed(format!("at most {} items", T::MOST), len));
        }
        let mut items = Self::with_capacity(len);
        for index in 0..len {
            items.push(T::read(reader).map_err(|fault| fault.at(index))?);
        }
        Ok(items)
    }
}

impl<T: Wire> Wire for Option<T> {
    const MIN_BYTES: usize = 1;

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Some(value) => value.write(out),
            None => put_nil(out),
        }
    }

    fn read(reader: &mut BodyReader<'_>) -> Read<Self> {
        if let [0xc0, rest @ ..] = reader.rest {
            reader.rest = rest;
            return Ok(None);
        }
        T::read(reader).map(Some)
    }
}
