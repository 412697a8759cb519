//! One step of a recorded program.

use crate::attention::{Attention, RowPlace};
use crate::linear::Linear;
use crate::mla::{self, MlaAttention};
use crate::moe::Moe;
use crate::op::{Op, Place, Value};
use crate::program::{AttentionConfig, Program, Scratch};
use crate::rows::{self, Store};
use crate::simd::Level;
use crate::step::{Step, StepError, below, length};

/// What a step writes.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// The cache: whole blocks. Keys and values of all rows are stored in it.
    pub kv: &'a mut [f32],
    /// `[logit_rows, out_width]`.
    pub out: &'a mut [f32],
    /// `[rows, kept_width]`.
    pub kept: &'a mut [f32],
    /// `[pool_rows, pooled_width]`.
    pub pooled: &'a mut [f32],
}

impl Program {
    /// Computes a step. `stored` is told each layer whose keys and values are stored, at once.
    /// # Errors
    /// When the step does not fit together or does not fit the cache, or an exchange between ranks fails.
    pub fn run(
        &mut self,
        step: &Step<'_>,
        mut to: Outputs<'_>,
        stored: &mut dyn FnMut(usize),
    ) -> Result<(), StepError> {
        self.check(step, &to)?;
        let rows = step.tokens.len();
        if rows == 0 && !self.is_apart() {
            return Ok(());
        }
        self.prepare(step);
        let last = self.ops.len() - 1;
        for (i, op) in self.ops.iter().enumerate() {
            // A step without rows has nothing to compute, but other ranks may need this one's experts.
            if step.tokens.is_empty() && !matches!(op, Op::Moe { .. }) {
                continue;
            }
            let place = self.places[i];
            let rows = if place.wanted_only { step.logit_rows.len() } else { rows };
            let len = rows * place.width;
            // The one buffer that is written; those that are read are others.
            let mut buffer = std::mem::take(&mut self.buffers[place.buffer]);
            if buffer.len() < len && i != last {
                buffer.resize(len, 0.0);
            }
            let pass = Pass {
                level: self.level,
                attention: &self.attention,
                values: Values { places: &self.places, buffers: &self.buffers, step },
            };
            let done = if i == last {
                let out = std::mem::take(&mut to.out);
                pass.apply(op, place, &mut to, &mut self.scratch, out)
            } else {
                pass.apply(op, place, &mut to, &mut self.scratch, &mut buffer[..len])
            };
            self.buffers[place.buffer] = buffer;
            done?;
            if let Op::RopeAndStoreKv { layer, .. } | Op::MlaStore { layer, .. } = op {
                stored(*layer);
            }
        }
        Ok(())
    }

    /// Places and angles of the rows, which all layers share.
    fn prepare(&mut self, step: &Step<'_>) {
        let AttentionConfig { rope, kv, .. } = &self.attention;
        let Scratch { angles, row_places, .. } = &mut self.scratch;
        let block_tokens = kv.block_tokens as i64;
        row_places.clear();
        row_places.extend(step.slots.iter().map(|slot| RowPlace {
            block: (slot / block_tokens) as usize,
            offset: (slot % block_tokens) as usize,
        }));
        let width = 2 * rope.inv_freq.len();
        angles.resize(step.positions.len() * width, 0.0);
        for (position, out) in step.positions.iter().zip(angles.chunks_exact_mut(width)) {
            rope.angles(*position as usize, out);
        }
    }

    fn check(&self, step: &Step<'_>, to: &Outputs<'_>) -> Result<(), StepError> {
        match (self.is_draft(), step.draft.is_some()) {
            (true, false) => {
                return Err(StepError::Kind("a draft pass needs hidden_from and first_keys"));
            }
            (false, true) => {
                return Err(StepError::Kind("a main pass reads no hidden rows"));
            }
            _ => {}
        }
        step.check(&self.attention.kv, to.kv.len())?;
        length("out", to.out.len(), step.logit_rows.len() * self.out_width())?;
        length("kept", to.kept.len(), step.tokens.len() * self.kept_width())?;
        length("pooled", to.pooled.len(), step.pool_rows.len() * self.pooled_width())?;
        for (op, place) in self.ops.iter().zip(&self.places) {
            if let Op::Embed { table } = op {
                let vocab = table.elements().len() / place.width;
                below("tokens", step.tokens.iter().map(|x| i64::from(*x)), vocab)?;
            }
        }
        Ok(())
    }
}

/// The values computed so far.
struct Values<'a> {
    places: &'a [Place],
    buffers: &'a [Vec<f32>],
    step: &'a Step<'a>,
}

impl<'a> Values<'a> {
    fn read(&self, value: Value) -> &'a [f32] {
        let place = value.place(self.places);
        let rows =
            if place.wanted_only { self.step.logit_rows.len() } else { self.step.tokens.len() };
        &self.buffers[place.buffer][..rows * place.width]
    }

    fn width(&self, value: Value) -> usize {
        value.place(self.places).width
    }
}

/// What all operations of a step share.
struct Pass<'a> {
    level: Level,
    attention: &'a AttentionConfig,
    values: Values<'a>,
}

impl Pass<'_> {
    fn apply(
        &self,
        op: &Op,
        place: Place,
        to: &mut Outputs<'_>,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) -> Result<(), StepError> {
        let Self { level, attention, values } = self;
        let (level, step, width) = (*level, values.step, place.width);
        let read = |value: Value| values.read(value);
        match op {
            Op::Embed { table } => {
                for (token, out) in step.tokens.iter().zip(out.chunks_exact_mut(width)) {
                    table.elements().read(*token as usize * width, out);
                }
            }
            Op::RmsNorm { x, weight, eps } => rows::rms_norm(level, read(*x), weight, *eps, out),
            Op::Linear { x, weight, residual } => {
                let job = Linear { x: read(*x), weight, residual: residual.map(read), y: out };
                job.compute(level, &mut scratch.linear);
            }
            Op::RopeAndStoreKv { layer, .. } => {
                let store = self.store(scratch, to.kv, *layer);
                rows::rope_and_store_kv(out, attention.heads, store);
            }
            Op::PagedAttention { qkv, layer } => {
                for rows in step.sequences() {
                    let attention = Attention {
                        queries: read(*qkv),
                        width: values.width(*qkv),
                        heads: attention.heads,
                        scale: attention.scale,
                        kv: to.kv,
                        shape: &attention.kv,
                        layer: *layer,
                        rows,
                        out: &mut *out,
                    };
                    attention.compute(level, &mut scratch.attention);
                }
            }
            Op::MlaStore { latent, norm, eps, layer, .. } => {
                let Some(shape) = &attention.mla else { return Ok(()) };
                let store = self.store(scratch, to.kv, *layer);
                mla::store(level, shape, out, read(*latent), (norm, *eps), store);
            }
            Op::MlaAttention { q, kv_b, layer } => {
                let Some(shape) = &attention.mla else { return Ok(()) };
                let attention = MlaAttention {
                    shape,
                    q: read(*q),
                    kv_b,
                    scale: attention.scale,
                    kv: to.kv,
                    cache: &attention.kv,
                    layer: *layer,
                    out,
                };
                let Scratch { linear, mla, .. } = scratch;
                attention.compute(level, &step.sequences(), linear, mla);
            }
            Op::SiluMul { x } => rows::silu_mul(level, read(*x), width, out),
            Op::Moe { x, experts, residual } => {
                let job = Moe { x: read(*x), experts, residual: read(*residual), y: out };
                return job.compute(level, &mut scratch.linear, &mut scratch.moe);
            }
            Op::Columns { x, start } => {
                let rows = read(*x).chunks_exact(values.width(*x));
                for (x, out) in rows.zip(out.chunks_exact_mut(width)) {
                    out.copy_from_slice(&x[*start..start + width]);
                }
            }
            Op::Concat { a, b } => {
                let first = values.width(*a);
                let rows = read(*a).chunks_exact(first).zip(read(*b).chunks_exact(width - first));
                for ((a, b), out) in rows.zip(out.chunks_exact_mut(width)) {
                    out[..first].copy_from_slice(a);
                    out[first..].copy_from_slice(b);
                }
            }
            Op::WantedRows { x } => {
                let x = read(*x);
                for (row, out) in step.logit_rows.iter().zip(out.chunks_exact_mut(width)) {
                    out.copy_from_slice(&x[*row as usize * width..][..width]);
                }
            }
            Op::KeepHidden { x } => self.keep(read(*x), &scratch.row_places, to),
            Op::Hidden => self.gather(to.kv, out),
            Op::PoolRows { x, norm } => {
                let (x, width) = (read(*x), values.width(*x));
                for (row, out) in step.pool_rows.iter().zip(to.pooled.chunks_exact_mut(width)) {
                    let x = &x[*row as usize * width..][..width];
                    match norm {
                        Some((weight, eps)) => rows::rms_norm(level, x, weight, *eps, out),
                        None => out.copy_from_slice(x),
                    }
                }
            }
        }
        Ok(())
    }

    fn store<'s>(&'s self, scratch: &'s Scratch, kv: &'s mut [f32], layer: usize) -> Store<'s> {
        Store {
            rope: &self.attention.rope,
            angles: &scratch.angles,
            places: &scratch.row_places,
            kv,
            shape: &self.attention.kv,
            layer,
        }
    }

    /// Keeps `x`, and in the main pass writes it into the tails: a block's is that of the newest row in it.
    fn keep(&self, x: &[f32], places: &[RowPlace], to: &mut Outputs<'_>) {
        to.kept.copy_from_slice(x);
        let (step, shape) = (self.values.step, &self.attention.kv);
        if step.draft.is_some() {
            return;
        }
        for rows in step.sequences() {
            let end = rows.start + rows.positions.len();
            for row in rows.start..end {
                if row + 1 == end || places[row].offset + 1 == shape.block_tokens {
                    let at = shape.tail_at(places[row].block);
                    let x = &x[row * shape.tail..(row + 1) * shape.tail];
                    to.kv[at..at + shape.tail].copy_from_slice(x);
                }
            }
        }
    }

    /// The rows that a draft pass begins with.
    fn gather(&self, kv: &[f32], out: &mut [f32]) {
        let Some(draft) = self.values.step.draft else { return };
        let shape = &self.attention.kv;
        for (from, out) in draft.hidden_from.iter().zip(out.chunks_exact_mut(shape.tail)) {
            let (rows, at) = if *from < 0 {
                (kv, shape.tail_at(-(from + 1) as usize))
            } else {
                (draft.hidden, *from as usize * shape.tail)
            };
            out.copy_from_slice(&rows[at..at + shape.tail]);
        }
    }
}
