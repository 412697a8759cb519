//! SmolLM2-135M in both of its forms: CPU time of a token, and what share of it each new operation takes.
//!
//! `cargo bench -p headrace-kernels` prints ms of one thread. Times are of the processor, not of the clock, so other
//! processes disturb them little, but shared caches and memory still do. Weights are noise: nothing depends on them.
#![expect(clippy::print_stdout, reason = "that is what a benchmark is for")]

use std::sync::Arc;

use headrace_kernels::attention::KvShape;
use headrace_kernels::mla::{HeadMatrices, MlaShape};
use headrace_kernels::moe::{ExpertParts, Experts};
use headrace_kernels::op::{RecordError, Value};
use headrace_kernels::program::{AttentionConfig, Program};
use headrace_kernels::routing::Routing;
use headrace_kernels::rows::Rope;
use headrace_kernels::run::Outputs;
use headrace_kernels::simd::Level;
use headrace_kernels::step::Step;
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

    fn experts(&self) -> Result<Arc<Experts>, Box<dyn std::error::Error>> {
        let parts = ExpertParts {
            gate: self.elements(EXPERTS * HIDDEN),
            bias: vec![0.0; EXPERTS],
            gate_up: vec![self.elements(2 * WIDTH * HIDDEN); EXPERTS],
            down: vec![self.elements(WIDTH * HIDDEN); EXPERTS],
            hidden: HIDDEN,
        };
        let routing = Routing {
            experts: EXPERTS,
            top_k: EXPERTS,
            groups: 1,
            top_groups: 1,
            normalise: true,
            scale: EXPERTS as f32,
        };
        Ok(Arc::new(Experts::pack(&parts, routing, self.dtype)?))
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
        draft: None,
    };
    // The system counts a thread's time in ticks of some ms, so runs of steps are timed.
    let (mut best, mut total) = (f64::INFINITY, 0.0);
    while total < 1_500.0 {
        let start = cpu_ms();
        let mut steps = 0.0;
        let took = loop {
            let to = Outputs { kv: &mut kv, out: &mut out, kept: &mut [] };
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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "{} context {CONTEXT}, ms of CPU for one step of 1, 8, 32 rows",
        Level::detect().name()
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
        let mut forms: [(&str, bool, Layer<'_>); 6] = [
            ("llama: attention", false, &mut |p, x, i| Ok(gqa(p, x, i)?)),
            ("deepseek: attention", true, &mut |p, x, i| Ok(mla(p, x, i)?)),
            ("dense 1024", true, &mut |p, x, _| Ok(dense(p, x, FFN - 512)?)),
            ("experts 16 x 64", true, &mut |p, x, _| Ok(p.moe(x, made.experts()?, x)?)),
            ("llama", false, &mut |p, x, i| {
                let x = gqa(p, x, i)?;
                Ok(dense(p, x, FFN)?)
            }),
            ("deepseek", true, &mut |p, x, i| {
                let x = mla(p, x, i)?;
                let shared = dense(p, x, 512)?;
                Ok(p.moe(x, made.experts()?, shared)?)
            }),
        ];
        for (name, is_mla, layer) in &mut forms {
            let mut program = layers(&made, *is_mla, |p, x, i| layer(p, x, i))?;
            let ms = [1, 8, 32].map(|rows| decode_ms(&mut program, rows));
            let [one, eight, many] = ms;
            println!("{dtype:?} {name:20} {:8.2} {:8.2} {:8.2}", one?, eight?, many?);
        }
    }
    Ok(())
}
