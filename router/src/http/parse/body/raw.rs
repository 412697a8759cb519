//! The bytes of a body, in pieces. Nothing is copied twice, and nothing takes room before it has come.

use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::error::RouteError;
use crate::limits::memory::{MemoryShare, Refused};
use crate::process::background;

/// The first piece of a body that came in several frames; its room doubles up to this.
pub(super) const FIRST_PIECE: usize = 256 << 10;

/// Each further piece. Memory that is used for the first time costs more than what is copied there: on a virtual machine
/// whose host gives it page by page, 3 to 12 us for 4 KiB. So another thread, of low priority, makes this room.
pub(super) const LONG_PIECE: usize = 1 << 20;

/// What keeping a piece takes beside its bytes.
pub(super) const PIECE_BYTES: usize = size_of::<Piece>();

/// One makes room at a time, which already takes all that memory gives.
static MAKER: Semaphore = Semaphore::const_new(1);

/// A body as it came.
#[derive(Debug, Default)]
pub(in crate::http) struct Raw {
    /// Most bodies are one frame, which then is not copied.
    only: Bytes,
    /// What was copied out of frames. All but the last are full.
    pieces: Vec<Piece>,
    /// As long as its headers say that it is.
    declared: Option<usize>,
}

#[derive(Debug)]
struct Piece {
    bytes: Vec<u8>,
    /// What it will hold at most.
    most: usize,
}

impl Raw {
    pub(super) fn new(declared: Option<usize>) -> Self {
        Self { declared, ..Self::default() }
    }

    pub(in crate::http) fn len(&self) -> usize {
        self.only.len() + self.pieces.iter().map(|piece| piece.bytes.len()).sum::<usize>()
    }

    /// Adds a frame, charged as room for it is made: a client that announces a long body takes nothing by that.
    ///
    /// # Errors
    /// `BodyTooComplex` or `Overloaded` if its share is refused; `Internal` if there is no thread to make room.
    ///
    /// # Cancel safety
    /// A dropped call may have added a part of the frame.
    pub(super) async fn push(
        &mut self,
        data: Bytes,
        share: &mut MemoryShare,
    ) -> Result<(), RouteError> {
        if self.only.is_empty() && self.pieces.is_empty() {
            charge(share, data.len())?;
            self.only = data;
            return Ok(());
        }
        if !self.only.is_empty() {
            let first = std::mem::take(&mut self.only);
            self.copy(&first, share).await?;
            share.give_back(first.len());
        }
        self.copy(&data, share).await
    }

    async fn copy(&mut self, mut data: &[u8], share: &mut MemoryShare) -> Result<(), RouteError> {
        while !data.is_empty() {
            if self.pieces.last().is_none_or(|piece| piece.bytes.len() >= piece.most) {
                charge(share, PIECE_BYTES)?;
                self.pieces.push(self.next_piece(share).await?);
            }
            let piece = self.pieces.last_mut().expect("one was pushed if there was none");
            let left = piece.most - piece.bytes.len();
            let (now, later) = data.split_at(data.len().min(left));
            piece.make_room(now.len(), share).map_err(|refused| refused.body(None))?;
            piece.bytes.extend_from_slice(now);
            data = later;
        }
        Ok(())
    }

    async fn next_piece(&self, share: &mut MemoryShare) -> Result<Piece, RouteError> {
        let declared = self.declared.and_then(|all| all.checked_sub(self.len()));
        let most =
            |piece: usize| declared.filter(|left| *left > 0).map_or(piece, |left| left.min(piece));
        if self.pieces.is_empty() {
            return Ok(Piece { bytes: Vec::new(), most: most(FIRST_PIECE) });
        }
        let most = most(LONG_PIECE);
        charge(share, most)?;
        let turn = MAKER.acquire().await;
        let turn = turn.map_err(|error| RouteError::internal("no turn to make room", error))?;
        let bytes = background::run("room", move || {
            let _turn = turn;
            touched(most)
        });
        Ok(Piece { bytes: bytes.await?, most })
    }

    /// In one piece. That is a copy of a body of more than one piece, so it is for threads that serve no sockets if the
    /// body is large.
    ///
    /// # Errors
    /// `BodyTooComplex` or `Overloaded` if there is no memory for the copy.
    pub(in crate::http) fn joined(mut self, share: &mut MemoryShare) -> Result<Bytes, RouteError> {
        if self.pieces.len() <= 1 {
            return Ok(self.pieces.pop().map_or(self.only, |piece| Bytes::from(piece.bytes)));
        }
        let len = self.len();
        charge(share, len)?;
        let mut whole = Vec::with_capacity(len);
        for piece in self.pieces {
            whole.extend_from_slice(&piece.bytes);
            share.give_back(piece.bytes.capacity() + PIECE_BYTES);
        }
        Ok(Bytes::from(whole))
    }
}

impl Piece {
    /// For this much more: room doubles, up to what there will be at most.
    fn make_room(&mut self, more: usize, share: &mut MemoryShare) -> Result<(), Refused> {
        let (old, needed) = (self.bytes.capacity(), self.bytes.len() + more);
        if needed > old {
            let new = needed.max((2 * old).min(self.most));
            share.charge(new)?; // while it moves there may be both
            self.bytes.reserve_exact(new - self.bytes.len());
            share.give_back(old);
        }
        Ok(())
    }
}

/// Room for so many bytes, each of whose pages was written to.
fn touched(bytes: usize) -> Vec<u8> {
    let mut room = Vec::with_capacity(bytes);
    room.resize(bytes, 1);
    room.clear();
    room
}

fn charge(share: &mut MemoryShare, bytes: usize) -> Result<(), RouteError> {
    share.charge(bytes).map_err(|refused| refused.body(None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::memory::MemoryPool;

    async fn of_frames(
        frames: &[usize],
        declared: Option<usize>,
        memory: &MemoryPool,
    ) -> (Raw, MemoryShare, Vec<u8>) {
        let (mut raw, mut share, mut sent) = (Raw::new(declared), memory.share(), Vec::new());
        for (i, len) in (0u8..).zip(frames) {
            sent.extend(std::iter::repeat_n(i, *len));
            raw.push(Bytes::from(vec![i; *len]), &mut share).await.unwrap();
        }
        assert_eq!(raw.len(), sent.len());
        (raw, share, sent)
    }

    #[tokio::test]
    async fn a_long_body_is_joined_and_charged_once_in_the_end() {
        let memory = MemoryPool::private(1 << 24);
        let first = FIRST_PIECE;
        for frames in [
            &[first, 1][..],
            &[first - 1, 2],
            &[1, first, first],
            &[1; 9],
            &[first, LONG_PIECE, 7],
            &[first, LONG_PIECE - 1, 2],
            &[3 * LONG_PIECE, 7],
        ] {
            for declared in [None, Some(frames.iter().sum())] {
                let (raw, mut share, sent) = of_frames(frames, declared, &memory).await;
                let pieces = raw.pieces.len();
                let bytes = raw.joined(&mut share).unwrap();
                assert!(bytes == sent, "{frames:?}");
                if pieces > 1 {
                    assert_eq!(share.used(), sent.len(), "{frames:?}");
                }
            }
        }
    }

    #[tokio::test]
    async fn a_long_body_takes_room_in_steps_and_no_more_than_its_headers_say() {
        let memory = MemoryPool::private(1 << 24);
        let pieces = |count: usize| count * PIECE_BYTES;
        let frames = [FIRST_PIECE, LONG_PIECE, 1];
        let (_raw, share, _) = of_frames(&frames, None, &memory).await;
        assert_eq!(share.used(), FIRST_PIECE + 2 * LONG_PIECE + pieces(3));
        let declared = Some(frames.iter().sum());
        let (_raw, share, _) = of_frames(&frames, declared, &memory).await;
        assert_eq!(share.used(), FIRST_PIECE + LONG_PIECE + 1 + pieces(3));
        let (_raw, share, _) = of_frames(&frames, Some(7), &memory).await;
        assert_eq!(share.used(), 7 + 2 * LONG_PIECE + pieces(3), "its headers lie");
    }

    #[tokio::test]
    async fn the_room_of_a_long_piece_is_refused_before_it_is_made() {
        let memory = MemoryPool::private(FIRST_PIECE + LONG_PIECE);
        let (mut raw, mut share, _) = of_frames(&[1, FIRST_PIECE - 1], None, &memory).await;
        let refused = raw.push(Bytes::from_static(b"x"), &mut share).await;
        assert!(matches!(refused, Err(RouteError::BodyTooComplex { .. })));
        assert_eq!(share.used(), FIRST_PIECE + 2 * PIECE_BYTES);
    }

    #[tokio::test]
    async fn joining_without_memory_for_a_copy_is_refused() {
        let memory = MemoryPool::private(1_500_000);
        let (raw, mut share, _) = of_frames(&[400_000, 600_000], Some(1_000_000), &memory).await;
        assert!(matches!(raw.joined(&mut share), Err(RouteError::BodyTooComplex { .. })));
    }

    #[test]
    fn room_is_empty_and_as_large_as_it_has_to_be() {
        let room = touched(4_321);
        assert!(room.is_empty() && room.capacity() == 4_321);
    }
}
