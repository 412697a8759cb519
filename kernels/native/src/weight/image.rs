//! Matrices as bytes, packed as they are: what a rank sends so that another one has the same bits without packing anew,
//! and what a file has that processes map.

use super::{GROUP, Lanes, PANEL, Weight};
use crate::simd::LANES;

/// Elements that lie one after the other, as little-endian bytes.
trait Packed: Copy {
    const BYTES: usize;
    fn put(&self, out: &mut Vec<u8>);
    fn get(&mut self, bytes: &[u8]);
}

macro_rules! packed {
    ($name:ty, $element:ty, $lanes:expr) => {
        impl Packed for $name {
            const BYTES: usize = $lanes * size_of::<$element>();

            fn put(&self, out: &mut Vec<u8>) {
                for x in self.0 {
                    out.extend_from_slice(&x.to_le_bytes());
                }
            }

            fn get(&mut self, bytes: &[u8]) {
                for (x, bytes) in self.0.iter_mut().zip(bytes.as_chunks().0) {
                    *x = <$element>::from_le_bytes(*bytes);
                }
            }
        }
    };
}

packed!(super::F32x16, f32, LANES);
packed!(super::Bf16x16, u16, LANES);
packed!(super::F16x16, u16, LANES);
packed!(super::Pairs, i8, 2 * LANES);

/// Each matrix has `of_matrix` lanes, one after the other.
fn put<T: Packed>(from: &[T], index: usize, of_matrix: usize, out: &mut Vec<u8>) {
    for lane in &from[index * of_matrix..][..of_matrix] {
        lane.put(out);
    }
}

/// What is left of `bytes`.
fn get<'a, T: Packed>(to: &mut [T], index: usize, of_matrix: usize, bytes: &'a [u8]) -> &'a [u8] {
    let (mine, rest) = bytes.split_at(of_matrix * T::BYTES);
    let lanes = &mut to[index * of_matrix..][..of_matrix];
    for (lane, bytes) in lanes.iter_mut().zip(mine.chunks_exact(T::BYTES)) {
        lane.get(bytes);
    }
    rest
}

impl Weight {
    /// Lanes of each matrix; with int8 its pairs, and its scales.
    fn lanes_of_matrix(&self) -> (usize, usize) {
        let halves = 2 * self.n.div_ceil(PANEL);
        match &self.lanes {
            Lanes::I8 { .. } => (halves * self.k.div_ceil(2), halves * self.k.div_ceil(GROUP)),
            Lanes::F32(_) | Lanes::Bf16(_) | Lanes::F16(_) => (halves * self.k, 0),
        }
    }

    /// Bytes of the image of one matrix.
    pub fn image_len(&self) -> usize {
        let (lanes, scales) = self.lanes_of_matrix();
        let of_lane = match &self.lanes {
            Lanes::F32(_) => super::F32x16::BYTES,
            Lanes::Bf16(_) => super::Bf16x16::BYTES,
            Lanes::F16(_) => super::F16x16::BYTES,
            Lanes::I8 { .. } => super::Pairs::BYTES,
        };
        lanes * of_lane + scales * super::F32x16::BYTES
    }

    /// Appends the image of matrix `index` to `out`.
    /// # Panics
    /// If there is no such matrix.
    pub fn read_image(&self, index: usize, out: &mut Vec<u8>) {
        self.read_lanes(index, out);
        self.read_scales(index, out);
    }

    /// Appends the image of all matrices to `out`, from which [`Self::lent`] makes them: their lanes, then their scales.
    pub fn read_all(&self, out: &mut Vec<u8>) {
        (0..self.count).for_each(|index| self.read_lanes(index, out));
        (0..self.count).for_each(|index| self.read_scales(index, out));
    }

    /// The first part of an image.
    /// # Panics
    /// If there is no such matrix.
    pub fn read_lanes(&self, index: usize, out: &mut Vec<u8>) {
        let (lanes, _) = self.lanes_of_matrix();
        match &self.lanes {
            Lanes::F32(from) => put(from, index, lanes, out),
            Lanes::Bf16(from) => put(from, index, lanes, out),
            Lanes::F16(from) => put(from, index, lanes, out),
            Lanes::I8 { pairs, .. } => put(pairs, index, lanes, out),
        }
    }

    /// The second part, which only integers have.
    /// # Panics
    /// If there is no such matrix.
    pub fn read_scales(&self, index: usize, out: &mut Vec<u8>) {
        if let Lanes::I8 { scales, .. } = &self.lanes {
            put(scales, index, self.lanes_of_matrix().1, out);
        }
    }

    /// Overwrites matrix `index` with that of an image, in the same place in memory.
    /// # Panics
    /// If there is no such matrix, or the image is not of [`Self::image_len`] bytes.
    pub fn write_image(&mut self, index: usize, image: &[u8]) {
        assert_eq!(image.len(), self.image_len(), "an image of this shape and dtype");
        let (lanes, scales) = self.lanes_of_matrix();
        let rest = match &mut self.lanes {
            Lanes::F32(to) => get(to.own(), index, lanes, image),
            Lanes::Bf16(to) => get(to.own(), index, lanes, image),
            Lanes::F16(to) => get(to.own(), index, lanes, image),
            Lanes::I8 { pairs, scales: to } => {
                let rest = get(pairs.own(), index, lanes, image);
                get(to.own(), index, scales, rest)
            }
        };
        debug_assert!(rest.is_empty(), "all of it was read");
    }
}
