//! Frames on a byte stream: `length as u32 little-endian | body`, one after the other.

use std::io;

use bytes::buf::Limit;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::{JoinHandle, spawn_blocking, yield_now};

use super::{CodecError, decode, encode};
use crate::core::frame::Frame;
use crate::process::background;

const HEADER_BYTES: usize = 4;

/// Room made for a read. A guess.
const READ_BYTES: usize = 64 << 10;

/// A buffer larger than this is given back once it is empty. A guess.
const KEEP_BYTES: usize = 1 << 20;

/// A longer body is decoded by a thread for blocking work, because others wait for the thread that serves this socket.
/// Frames of a worker at work are shorter. A guess.
const LONG_BYTES: usize = 64 << 10;

/// A body longer than this comes in pieces of [`READ_BYTES`], and a thread of low priority puts it together: room that grows is
/// copied with everybody waiting. No frame of a worker at work is as long. A guess.
const VERY_LONG_BYTES: usize = 256 << 10;

/// What is known of a frame before it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameArrival {
    /// Another [`READ_BYTES`] came. Fewer do not count: whoever drips bytes is silent.
    Part,
    /// All of it came, and is still to be decoded.
    Whole,
}

/// Why no further frame comes.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The stream failed.
    #[error("reading from the link failed")]
    Io(#[from] io::Error),
    /// The stream ended inside a frame.
    #[error("the link closed {got} bytes into a frame")]
    Ended {
        /// Bytes of the frame that came, its header included.
        got: usize,
    },
    /// The peer sent something else than a frame.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

/// Reads frames. After an error no frame follows.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    /// Received and not yet decoded. Grows with what came, not with what a header promises.
    buffer: BytesMut,
    limit: usize,
    /// A very long frame of which some came.
    coming: Option<Coming>,
    /// Bytes that came since the last [`FrameArrival::Part`].
    untold: usize,
    /// A long frame that is being decoded.
    decoding: Option<JoinHandle<Result<Frame, ReadError>>>,
}

/// The body of a very long frame, as far as it came. All pieces but the last are full.
#[derive(Debug)]
struct Coming {
    pieces: Vec<BytesMut>,
    /// Room in the last piece.
    room: usize,
    /// Bytes that came.
    got: usize,
    len: usize,
}

impl Coming {
    /// Where the next bytes go: at most so many as one read brings.
    fn room(&mut self) -> Limit<&mut BytesMut> {
        if self.room == 0 {
            self.room = READ_BYTES.min(self.len - self.got);
            self.pieces.push(BytesMut::with_capacity(self.room));
        }
        let piece = self.pieces.last_mut().expect("one was pushed if there was none");
        piece.limit(self.room)
    }

    fn took(&mut self, bytes: usize) {
        self.room -= bytes;
        self.got += bytes;
    }

    /// All of it, in one piece.
    fn joined(self) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.len);
        for piece in self.pieces {
            body.extend_from_slice(&piece);
        }
        body
    }
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Takes frames with bodies of at most `limit` bytes.
    pub fn new(stream: R, limit: usize) -> Self {
        Self { stream, buffer: BytesMut::new(), limit, coming: None, untold: 0, decoding: None }
    }

    /// Another limit from the next frame on: a peer that has not proved itself gets a low one.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// The next frame; `None` once the peer closed the stream between two frames.
    ///
    /// # Errors
    /// The stream is of no use any more.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing.
    pub async fn next(&mut self) -> Result<Option<Frame>, ReadError> {
        self.next_telling(|_| {}).await
    }

    /// The same, and says meanwhile how a long frame comes along.
    ///
    /// # Errors
    /// As [`Self::next`].
    ///
    /// # Cancel safety
    /// As [`Self::next`].
    pub async fn next_telling(
        &mut self,
        tell: impl Fn(FrameArrival),
    ) -> Result<Option<Frame>, ReadError> {
        loop {
            if let Some(decoding) = &mut self.decoding {
                let frame = decoding.await;
                self.decoding = None;
                return Ok(Some(frame.map_err(io::Error::other)??));
            }
            if let Some(body) = self.very_long_body(&tell).await? {
                tell(FrameArrival::Whole);
                let decoded = background::run("decode", move || decode(&body.joined()));
                self.decoding =
                    Some(tokio::spawn(
                        async move { Ok(decoded.await.map_err(io::Error::other)??) },
                    ));
                continue;
            }
            if let Some(body) = self.long_body()? {
                tell(FrameArrival::Whole);
                self.decoding = Some(spawn_blocking(move || Ok(decode(&body)?)));
                continue;
            }
            if let Some(frame) = self.ready()? {
                return Ok(Some(frame));
            }
            self.buffer.reserve(READ_BYTES);
            match self.stream.read_buf(&mut self.buffer).await? {
                0 => {
                    return match self.buffer.len() {
                        0 => Ok(None),
                        got => Err(ReadError::Ended { got }),
                    };
                }
                bytes => self.came(bytes, &tell),
            }
        }
    }

    /// The next frame if all of it has been received: one read often brings several.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub fn ready(&mut self) -> Result<Option<Frame>, CodecError> {
        if self.coming.is_some() || self.decoding.is_some() {
            return Ok(None); // it comes first
        }
        let Some(body) = self.body()? else { return Ok(None) };
        let (len, frame) = (body.len(), decode(body)?);
        self.buffer.advance(HEADER_BYTES + len);
        self.give_back_after(len);
        Ok(Some(frame))
    }

    /// The body of the next frame if it is a very long one, once it has been received. Others go first between two reads.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing.
    async fn very_long_body(
        &mut self,
        tell: &impl Fn(FrameArrival),
    ) -> Result<Option<Coming>, ReadError> {
        if self.coming.is_none() {
            let Some(len) = self.announced()?.filter(|len| *len > VERY_LONG_BYTES) else {
                return Ok(None);
            };
            self.buffer.advance(HEADER_BYTES);
            let begin = self.buffer.split_to(len.min(self.buffer.len()));
            let got = begin.len();
            self.coming = Some(Coming { pieces: vec![begin], room: 0, got, len });
        }
        while let Some(coming) = self.coming.as_mut().filter(|coming| coming.got < coming.len) {
            match self.stream.read_buf(&mut coming.room()).await? {
                0 => return Err(ReadError::Ended { got: HEADER_BYTES + coming.got }),
                bytes => {
                    coming.took(bytes);
                    self.came(bytes, tell);
                }
            }
            yield_now().await;
        }
        Ok(self.coming.take())
    }

    /// Takes note of bytes.
    fn came(&mut self, bytes: usize, tell: &impl Fn(FrameArrival)) {
        self.untold += bytes;
        if self.untold >= READ_BYTES {
            self.untold = 0;
            tell(FrameArrival::Part);
        }
    }

    /// The body of the next frame if it is a long one and has been received.
    fn long_body(&mut self) -> Result<Option<Bytes>, CodecError> {
        let Some(len) = self.body()?.map(<[u8]>::len).filter(|len| *len > LONG_BYTES) else {
            return Ok(None);
        };
        self.buffer.advance(HEADER_BYTES);
        let body = self.buffer.split_to(len).freeze();
        self.give_back_after(len);
        Ok(Some(body))
    }

    /// The body of the next frame if it has been received.
    fn body(&self) -> Result<Option<&[u8]>, CodecError> {
        let len = self.announced()?;
        Ok(len.and_then(|len| self.buffer[HEADER_BYTES..].get(..len)))
    }

    /// How long the body of the next frame is, if its header has been received.
    fn announced(&self) -> Result<Option<usize>, CodecError> {
        let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let len = usize::try_from(u32::from_le_bytes(*header)).unwrap_or(usize::MAX);
        if len > self.limit {
            return Err(CodecError::TooLong { got: len, limit: self.limit });
        }
        Ok(Some(len))
    }

    fn give_back_after(&mut self, len: usize) {
        if self.buffer.is_empty() && len > KEEP_BYTES {
            self.buffer = BytesMut::new();
        }
    }
}

/// Writes frames: [`push`](Self::push) collects, [`flush`](Self::flush) sends all of them at once.
#[derive(Debug)]
pub struct FrameWriter<W> {
    stream: W,
    out: Vec<u8>,
    /// Bytes of `out` that the stream took.
    sent: usize,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// Writes to `stream`.
    pub fn new(stream: W) -> Self {
        Self { stream, out: Vec::new(), sent: 0 }
    }

    /// Adds a frame to what the next flush sends.
    ///
    /// # Errors
    /// [`CodecError::TooLong`]; nothing was added.
    pub fn push(&mut self, frame: &Frame) -> Result<(), CodecError> {
        let start = self.out.len();
        self.out.extend_from_slice(&[0; HEADER_BYTES]);
        if let Err(error) = encode(frame, &mut self.out) {
            self.out.truncate(start);
            return Err(error);
        }
        let body = start + HEADER_BYTES;
        let len = u32::try_from(self.out.len() - body).expect("encode keeps to MAX_FRAME_BYTES");
        self.out[start..body].copy_from_slice(&len.to_le_bytes());
        Ok(())
    }

    /// Bytes that wait for the stream.
    pub fn pending(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Sends all that was pushed.
    ///
    /// # Errors
    /// Those of the stream.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing and sends nothing twice: the next one goes on.
    pub async fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            match self.stream.write(&self.out[self.sent..]).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                n => self.sent += n,
            }
        }
        self.sent = 0;
        self.out.clear();
        self.out.shrink_to(KEEP_BYTES);
        self.stream.flush().await
    }

    /// Sends all that was pushed and closes the stream.
    ///
    /// # Errors
    /// Those of the stream.
    pub async fn close(&mut self) -> io::Result<()> {
        self.flush().await?;
        self.stream.shutdown().await
    }
}
