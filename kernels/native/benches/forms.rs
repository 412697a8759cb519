//! SmolLM2-135M in both of its forms: CPU time of a step, by part, and how far that is from what the machine can do.
//!
//! `cargo bench -p headrace-kernels` prints ms of one thread, and in brackets the share of it that the roof would take:
//! all weights and keys once through memory, or all products at the rate of the inner loop in the cache. Times are of the processor, not of the clock, so other
//! processes disturb them little, but shared caches and memory still do. Weights are noise: nothing depends on them.
#![expect(clippy::print_stdout, reason = "that is what a benchmark is for")]

use std::hint::black_box;
use std::sync::Arc;

use headrace_kernels::attention::KvShape;
use headrace_kernels::mla::{HeadMatrices, MlaShape};
use headrace_kernels::moe::router::Router;
use headrace_kernels::moe::routing::Routing;
use headrace_kernels::moe::slots::Slots;
use headrace_kernels::moe::{Experts, SharedExpert};
use headrace_kernels::op::{RecordError, Value};
use headrace_kernels::program::{AttentionConfig, Program};
use headrace_kernels::rows::Rope;
use headrace_kernels::run::Outputs;
use headrace_kernels::simd::{Kernel, Level, Simd};
use headrace_kernels::step::Step;
use headrace_kernels::tile::{F32x16, tile};
use headrace_kernels::weight::{Dtype, Elements, Table, Weight};

const HIDDEN: usize = 576;
const HEADS: usize = 9;
const LAYERS: usize = 30;
const VOCAB: usize = 49_152;
const FFN: usize = 1536;
const EXPERTS: usize = 16;
const WIDTH: usize = 64;
const BLOCK: usize = 16;
const CONTEXT: usize = 192;
const MLA: MlaShape =
    MlaShape { heads: HEADS, kv_lora_rank: 256, nope_dim: 0, rope_dim: 192, v_dim: 64 };

/// Weights of noise.
struct Made {
    noise: Vec<f32>,
    dtype: Dtype,
}

impl Made {
    fn new(dtype: Dtype) -> Self {
        let mut state = 1_u32;
        let noise = (0..VOCAB * HIDDEN).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        });
        Self { noise: noise.map(|x| x / 24.0).collect(), dtype }
    }

    fn elements(&self, len: usize) -> Elements<'_> {
        Elements::F32(&self.noise[..len])
    }

    fn matrix(&self, n: usize, k: usize) -> Arc<Weight> {
        Arc::new(Weight::pack(&[self.elements(n * k)], k, None, self.dtype))
    }

    /// With a shared expert of this width, if it has some.
    fn experts(&self, shared: usize) -> Result<Arc<Experts>, Box<dyn std::error::Error>> {
        let routing = Routing {
            experts: EXPERTS,
            top_k: EXPERTS,
            groups: 1,
            top_groups: 1,
            normalise: true,
            scale: EXPERTS as f32,
        };
        let gate = self.elements(EXPERTS * HIDDEN);
        let router = Router::new(gate, vec![0.0; EXPERTS], HIDDEN, routing)?;
        let mut slots = Slots::with_room(EXPERTS, (HIDDEN, WIDTH), self.dtype);
        for _ in 0..EXPERTS {
            slots.push(self.elements(2 * WIDTH * HIDDEN), self.elements(WIDTH * HIDDEN))?;
        }
        let shared = (shared > 0).then(|| SharedExpert {
            gate_up: self.matrix(2 * shared, HIDDEN),
            down: self.matrix(HIDDEN, shared),
        });
        Ok(Arc::new(Experts::new(router, slots, shared, None)?))
    }

    fn table(&self) -> Arc<Table> {
        Arc::new(Table::new(self.elements(HIDDEN * 64)))
    }
}

fn program(mla: Option<MlaShape>) -> Result<Program, RecordError> {
    let kv = KvShape {
        layers: LAYERS,
        kv_heads: 3,
        key_dim: 64,
        value_dim: 64,
        block_tokens: BLOCK,
        tail: 0,
    };
    let kv = mla.map_or(kv, |mla| mla.kv_shape(LAYERS, BLOCK, 0));
    let pairs = if mla.is_some() { 96 } else { 32 };
    let inv_freq = (0..pairs).map(|i| 1.0 / (1.0 + i as f32)).collect();
    let rope = Rope { inv_freq, scale: 1.0, interleave: mla.is_some() };
    Program::new(Level::detect(), AttentionConfig { heads: HEADS, scale: 0.125, rope, kv, mla })
}

/// `layer` thirty times over the hidden rows.
fn layers(
    made: &Made,
    mla: bool,
    mut layer: impl FnMut(&mut Program, Value, usize) -> Result<Value, Box<dyn std::error::Error>>,
) -> Result<Program, Box<dyn std::error::Error>> {
    let mut program = program(mla.then_some(MLA))?;
    let mut x = program.embed(made.table(), HIDDEN)?;
    for i in 0..LAYERS {
        x = layer(&mut program, x, i)?;
    }
    program.wanted_rows(x)?;
    program.finish()?;
    Ok(program)
}

/// CPU time of this thread so far, in ms.
fn cpu_ms() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(f64::NAN) / 1e6
}

/// The least CPU time of `rows` sequences that decode one token at `CONTEXT`.
fn decode_ms(program: &mut Program, rows: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let blocks = CONTEXT / BLOCK;
    let mut kv = vec![0.0; rows * blocks * program.block_bytes() / 4];
    let mut out = vec![0.0; rows * program.out_width()];
    let end = CONTEXT as i32;
    let block_tables: Vec<i32> = (0..(rows * blocks) as i32).collect();
    let last = |row: usize| ((row + 1) * CONTEXT - 1) as i64;
    let step = Step {
        tokens: &vec![1; rows],
        positions: &vec![end - 1; rows],
        slots: &(0..rows).map(last).collect::<Vec<_>>(),
        seq_starts: &(0..=rows as i32).collect::<Vec<_>>(),
        context_lens: &vec![end; rows],
        block_tables: &block_tables,
        logit_rows: &(0..rows as i32).collect::<Vec<_>>(),
        pool_rows: &[],
        draft: None,
    };
    // The system counts a thread's time in ticks of some ms, so runs of steps are timed.
    let (mut best, mut total) = (f64::INFINITY, 0.0);
    while total < 600.0 {
        let start = cpu_ms();
        let mut steps = 0.0;
        let took = loop {
            let to = Outputs { kv: &mut kv, out: &mut out, kept: &mut [], pooled: &mut [] };
            program.run(&step, to, &mut |_| {})?;
            steps += 1.0;
            let took = cpu_ms() - start;
            if took > 200.0 {
                break took;
            }
        };
        (best, total) = (best.min(took / steps), total + took);
    }
    Ok(best)
}

/// What a layer needs: products of a row, weights, and floats of a token's keys and values.
#[derive(Clone, Copy)]
struct Need {
    products: usize,
    weights: usize,
    cached: usize,
}

impl Need {
    const GQA: Self = Self::attention(960 * HIDDEN + HIDDEN * HIDDEN, HEADS * 128, 384);
    const MLA: Self =
        Self::attention((HEADS * 192 + 448 + HIDDEN) * HIDDEN + HEADS * 64 * 256, HEADS * 448, 448);

    const fn attention(weights: usize, pair: usize, cached: usize) -> Self {
        Self { products: weights + CONTEXT * pair, weights, cached }
    }

    const fn dense(self, ffn: usize) -> Self {
        let more = 3 * ffn * HIDDEN;
        Self { products: self.products + more, weights: self.weights + more, cached: self.cached }
    }
}

/// What this machine does at most.
struct Roof {
    bytes_per_ms: f64,
    products_per_ms: f64,
}

/// The inner loop on what fits the first-level cache.
struct Peak<'a> {
    a: &'a [[f32; 12]],
    w: &'a [F32x16],
    times: usize,
}

impl Kernel for Peak<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [[s.splat(0.0); 2]; 12];
        for _ in 0..self.times {
            tile::<S, F32x16, 12, 2, 2>(s, self.a, [self.w, &self.w[1..]], &mut sums);
        }
        sums.iter().flatten().map(|sum| s.sum(*sum)).sum()
    }
}

impl Roof {
    fn measure(made: &Made) -> Self {
        let once = |mut work: Box<dyn FnMut() + '_>| {
            let start = cpu_ms();
            let mut times = 0.0;
            loop {
                work();
                times += 1.0;
                let took = cpu_ms() - start;
                if took > 300.0 {
                    break took / times;
                }
            }
        };
        let noise: &[[f32; 16]] = made.noise.as_chunks().0; // 113 MB
        let read = once(Box::new(|| {
            let mut sums = [0.0; 16];
            for lanes in noise {
                for (sum, x) in sums.iter_mut().zip(lanes) {
                    *sum += x;
                }
            }
            black_box(sums);
        }));
        let (a, w) = (vec![[1.0; 12]; 128], vec![F32x16([1e-9; 16]); 256]);
        let times = 1000;
        let multiply = once(Box::new(|| {
            black_box(Level::detect().run(Peak { a: &a, w: &w, times }));
        }));
        Self {
            bytes_per_ms: size_of_val(noise) as f64 / read,
            products_per_ms: (12 * 32 * 128 * times) as f64 / multiply,
        }
    }

    fn ms(&self, need: Need, rows: usize, bytes_of_weight: f64) -> f64 {
        let cached = (rows * CONTEXT * need.cached * 4) as f64;
        let bytes = need.weights as f64 * bytes_of_weight + cached;
        let products = (rows * need.products) as f64;
        LAYERS as f64 * (bytes / self.bytes_per_ms).max(products / self.products_per_ms)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let roof = Roof::measure(&Made::new(Dtype::Float32));
    println!(
        "{}, context {CONTEXT}, {:.1} GB/s, {:.1} G products/s; a step of 1, 8, 32 rows:",
        Level::detect().name(),
        roof.bytes_per_ms / 1e6,
        roof.products_per_ms / 1e6
    );
    for dtype in [Dtype::Int8, Dtype::Float32] {
        let made = Made::new(dtype);
        let ones = || vec![1.0; HIDDEN];
        let dense = |program: &mut Program, x: Value, ffn: usize| {
            let h = program.linear(x, made.matrix(2 * ffn, HIDDEN), None)?;
            let h = program.silu_mul(h)?;
            program.linear(h, made.matrix(HIDDEN, ffn), Some(x))
        };
        let gqa = |program: &mut Program, x: Value, i: usize| {
            let h = program.rms_norm(x, ones(), 1e-5)?;
            let qkv = program.linear(h, made.matrix(960, HIDDEN), None)?;
            let qkv = program.rope_and_store_kv(qkv, i)?;
            let y = program.paged_attention(qkv, i)?;
            program.linear(y, made.matrix(HIDDEN, HIDDEN), Some(x))
        };
        let kv_b = made.elements(HEADS * MLA.v_dim * MLA.kv_lora_rank);
        let mla = |program: &mut Program, x: Value, i: usize| {
            let h = program.rms_norm(x, ones(), 1e-5)?;
            let q = program.linear(h, made.matrix(HEADS * 192, HIDDEN), None)?;
            let latent = program.linear(h, made.matrix(256 + 192, HIDDEN), None)?;
            let q = program.mla_store(q, latent, vec![1.0; 256], 1e-6, i)?;
            let kv_b = Arc::new(HeadMatrices::pack(kv_b, &MLA, dtype));
            let y = program.mla_attention(q, kv_b, i)?;
            program.linear(y, made.matrix(HIDDEN, HIDDEN), Some(x))
        };
        type Layer<'a> = &'a mut dyn FnMut(
            &mut Program,
            Value,
            usize,
        ) -> Result<Value, Box<dyn std::error::Error>>;
        let none = Need { products: 0, weights: 0, cached: 0 };
        let mut forms: [(&str, Need, bool, Layer<'_>); 6] = [
            ("llama: attention", Need::GQA, false, &mut |p, x, i| Ok(gqa(p, x, i)?)),
            ("deepseek: attention", Need::MLA, true, &mut |p, x, i| Ok(mla(p, x, i)?)),
            ("dense 1024", none.dense(1024), true, &mut |p, x, _| Ok(dense(p, x, FFN - 512)?)),
            ("experts 16 x 64", none.dense(1024), true, &mut |p, x, _| {
                Ok(p.moe(x, made.experts(0)?, x)?)
            }),
            ("llama", Need::GQA.dense(FFN), false, &mut |p, x, i| {
                let x = gqa(p, x, i)?;
                Ok(dense(p, x, FFN)?)
            }),
            ("deepseek", Need::MLA.dense(FFN), true, &mut |p, x, i| {
                let x = mla(p, x, i)?;
                Ok(p.moe(x, made.experts(512)?, x)?)
            }),
        ];
        // A scale in float32 belongs to 64 weights of int8.
        let bytes_of_weight = if dtype == Dtype::Int8 { 1.0625 } else { 4.0 };
        for (name, need, is_mla, layer) in &mut forms {
            let mut program = layers(&made, *is_mla, |p, x, i| layer(p, x, i))?;
            print!("{dtype:?} {name:20}");
            for rows in [1, 8, 32] {
                let ms = decode_ms(&mut program, rows)?;
                let share = roof.ms(*need, rows, bytes_of_weight) / ms;
                print!("  {ms:7.2} ({:2.0}%)", share * 100.0);
            }
            println!();
        }
    }
    Ok(())
}
