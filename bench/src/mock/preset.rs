//! What a mock worker stands for: step costs and sizes, from a preset and from flags.

use std::path::Path;
use std::str::FromStr;

use headrace_router::core::frame::{Capacity, StepCost};
use serde::Deserialize;

use super::engine::EngineConfig;
use super::exchange::Terms;
use crate::BadInput;

/// DeepSeek-R1, one GPU of an expert-parallel group. `bench/presets/derive.py` made them and says from what.
const BUILT_IN: [(&str, &str); 3] = [
    ("h200", include_str!("../../presets/h200.json")),
    ("b200", include_str!("../../presets/b200.json")),
    ("gb200", include_str!("../../presets/gb200.json")),
];
/// Where neither preset nor flag says it.
const SEQUENCES: u32 = 256;
const BATCHED_TOKENS: u32 = 8192;
const BLOCK_TOKENS: u32 = 64;
const BLOCKS: u32 = 8192;
const WAITING: u32 = 4096;
const KV_GBPS: f64 = 400.0;

/// Which worker is modelled. Sizes that are left out come from the preset.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ModelArgs {
    /// Step costs and sizes: h200, b200 or gb200 (DeepSeek-R1, one GPU), or a JSON file like theirs.
    #[arg(long, value_name = "NAME|FILE", default_value = "h200")]
    pub(crate) preset: String,
    /// Step costs in ms, in place of the preset's: of a step, and for each prompt token, each token that a prompt token
    /// looks back at, each row that decodes, each KV token read.
    #[arg(long, value_name = "STEP,PREFILL,CONTEXT,ROW,KV")]
    pub(crate) cost: Option<Cost>,
    /// KV blocks of each worker.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1 << 30))]
    pub(crate) blocks: Option<u32>,
    /// Tokens of a block.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1 << 20))]
    pub(crate) block_tokens: Option<u32>,
    /// Sequences that run at once.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1 << 30))]
    pub(crate) sequences: Option<u32>,
    /// Tokens of a step.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1 << 30))]
    pub(crate) batched_tokens: Option<u32>,
    /// Requests that wait inside a worker.
    #[arg(long, value_name = "N", default_value_t = WAITING)]
    pub(crate) waiting: u32,
    /// Mean tokens that a row gets from a step: above 1 with multi-token prediction. Below 1 each token takes several
    /// steps, for answers that were made shorter.
    #[arg(long, value_name = "X")]
    pub(crate) accepted: Option<f64>,
    /// Tokens of the modelled machine that each token of a prompt stands for.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..1 << 16))]
    pub(crate) token_scale: u32,
    /// Steps take up to this share longer or shorter than their cost.
    #[arg(long, value_name = "SHARE", default_value_t = 0.02)]
    pub(crate) noise: f64,
    /// Workers say what their steps cost when they dial in. Without it the router learns that from the steps alone.
    #[arg(long)]
    pub(crate) step_prior: bool,
    /// Gbit/s at which a worker sends KV to others; the preset's network card if left out.
    #[arg(long, value_name = "GBPS")]
    pub(crate) kv_gbps: Option<f64>,
    /// From the last byte sent to the KV being of use: messages to and fro, in ms. The default is a guess.
    #[arg(long, value_name = "MS", default_value_t = 1.0)]
    pub(crate) kv_latency_ms: f64,
    /// Decides noise, faults and answers.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Coefficients of a step's time, as `--cost` takes them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost(StepCost);

/// What a preset's file says; it may say more.
#[derive(Debug, Clone, Deserialize)]
struct Preset {
    cost: StepCost,
    #[serde(default)]
    blocks: Option<u32>,
    #[serde(default)]
    block_tokens: Option<u32>,
    #[serde(default)]
    sequences: Option<u32>,
    #[serde(default)]
    batched_tokens: Option<u32>,
    #[serde(default)]
    accepted: Option<f64>,
    /// 0: its KV cannot be moved.
    #[serde(default)]
    kv_token_bytes: u64,
    #[serde(default)]
    kv_gbps: Option<f64>,
}

impl ModelArgs {
    /// What one worker of the fleet is; `number` sets its noise apart from that of the others.
    ///
    /// # Errors
    /// The preset is unknown or makes no sense.
    pub(crate) fn engine(&self) -> Result<EngineConfig, BadInput> {
        let preset = Preset::named(&self.preset)?;
        let cost = self.cost.map_or(preset.cost, |cost| cost.0);
        check(&self.preset, &cost)?;
        let accepted = self.accepted.or(preset.accepted).unwrap_or(1.0);
        if !(accepted > 0.0 && accepted <= 64.0) {
            return Err(BadInput(format!("--accepted {accepted}: from above 0 to 64")));
        }
        if !(0.0..1.0).contains(&self.noise) {
            return Err(BadInput(format!("--noise {}: from 0 to below 1", self.noise)));
        }
        let size = |flag: Option<u32>, preset: Option<u32>, usual: u32| {
            flag.or(preset).unwrap_or(usual).max(1)
        };
        Ok(EngineConfig {
            cost,
            capacity: Capacity {
                blocks: size(self.blocks, preset.blocks, BLOCKS),
                sequences: size(self.sequences, preset.sequences, SEQUENCES),
                batched_tokens: size(self.batched_tokens, preset.batched_tokens, BATCHED_TOKENS),
                waiting: self.waiting,
                host_blocks: 0,
                disk_blocks: 0,
            },
            block_tokens: size(self.block_tokens, preset.block_tokens, BLOCK_TOKENS),
            token_scale: self.token_scale,
            noise: self.noise,
            accepted,
            seed: self.seed,
            vocab: 0,
            epoch: 0,
        })
    }
}

impl ModelArgs {
    /// What it costs to move KV between such engines.
    ///
    /// # Errors
    /// The preset is unknown or makes no sense.
    pub(crate) fn terms(&self, engine: &EngineConfig) -> Result<Terms, BadInput> {
        let preset = Preset::named(&self.preset)?;
        let gbps = self.kv_gbps.or(preset.kv_gbps).unwrap_or(KV_GBPS);
        if !(gbps > 0.0 && gbps <= 1e6) {
            return Err(BadInput(format!("--kv-gbps {gbps}: from above 0 to 1000000")));
        }
        let latency_ms = self.kv_latency_ms;
        if !(0.0..=1e6).contains(&latency_ms) {
            return Err(BadInput(format!("--kv-latency-ms {latency_ms}: from 0 to 1000000")));
        }
        let tokens = u64::from(engine.block_tokens) * u64::from(engine.token_scale);
        Ok(Terms {
            bytes_per_ms: gbps * 1e9 / 8.0 / 1e3,
            latency_ms,
            block_bytes: preset.kv_token_bytes.saturating_mul(tokens),
            block_tokens: engine.block_tokens,
        })
    }
}

impl Preset {
    fn named(name: &str) -> Result<Self, BadInput> {
        let built_in = BUILT_IN.iter().find(|(built_in, _)| *built_in == name);
        let text = match built_in {
            Some((_, text)) => (*text).to_owned(),
            None => std::fs::read_to_string(Path::new(name)).map_err(|error| {
                let names = BUILT_IN.map(|(name, _)| name).join(", ");
                BadInput(format!("--preset {name}: neither one of {names} nor a file: {error}"))
            })?,
        };
        serde_json::from_str(&text).map_err(|error| BadInput(format!("--preset {name}: {error}")))
    }
}

fn check(name: &str, cost: &StepCost) -> Result<(), BadInput> {
    let StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms } = *cost;
    let fine = |ms: f64| (0.0..1e6).contains(&ms);
    if [fixed_ms, prefill_ms, context_ms, row_ms, kv_ms].into_iter().all(fine) {
        return Ok(());
    }
    Err(BadInput(format!("--preset {name}: a cost is negative or no number: {cost:?}")))
}

impl FromStr for Cost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<f64>, _> = text.split(',').map(|n| n.trim().parse()).collect();
        let numbers = numbers.map_err(|error| format!("`{text}`: {error}"))?;
        let [fixed_ms, prefill_ms, context_ms, row_ms, kv_ms] = numbers[..] else {
            return Err(format!("`{text}` has {} numbers, not 5", numbers.len()));
        };
        if !numbers.iter().all(|ms| (0.0..1e6).contains(ms)) {
            return Err(format!("`{text}`: a cost is from 0 to 1000000 ms"));
        }
        Ok(Self(StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms }))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        model: ModelArgs,
    }

    /// The arguments that these flags give.
    pub(crate) fn model_args(flags: &str) -> ModelArgs {
        Flags::parse_from(std::iter::once("test").chain(flags.split_whitespace())).model
    }

    #[test]
    fn presets_are_plausible_for_one_gpu() {
        for (name, _) in BUILT_IN {
            let config = model_args(&format!("--preset {name}")).engine().unwrap();
            let StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms } = config.cost;
            let step = 8192.0;
            let prefill_s = (fixed_ms + prefill_ms * step + context_ms * step * step / 2.0) / 1e3;
            let tokens_per_s = step / prefill_s;
            assert!((3_000.0..200_000.0).contains(&tokens_per_s), "{name}: {tokens_per_s}");
            let decode_ms = fixed_ms + 64.0 * row_ms + 64.0 * 4096.0 * kv_ms;
            assert!((3.0..80.0).contains(&decode_ms), "{name}: {decode_ms} ms");
            let tokens = config.capacity.blocks * config.block_tokens;
            assert!((100_000..10_000_000).contains(&tokens), "{name}: {tokens} KV tokens");
        }
    }

    #[test]
    fn a_prompt_moves_in_milliseconds() {
        let args = model_args("--preset h200 --block-tokens 16 --token-scale 32");
        let terms = args.terms(&args.engine().unwrap()).unwrap();
        assert_eq!(terms.block_bytes, 512 * 576 * 61);
        let ms = 16.0 * terms.block_bytes as f64 / terms.bytes_per_ms;
        assert!((5.0..7.0).contains(&ms), "8192 tokens take {ms} ms");
    }

    #[test]
    fn flags_come_before_the_preset() {
        let flags = "--cost 1,2,3,4,5 --blocks 7 --block-tokens 16 --accepted 2.5";
        let config = model_args(flags).engine().unwrap();
        assert_eq!((config.cost.fixed_ms, config.cost.kv_ms), (1.0, 5.0));
        assert_eq!((config.capacity.blocks, config.block_tokens), (7, 16));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for bad in ["1,2,3,4", "1,2,3,4,x", "1,2,3,4,-5", "nan,1,1,1,1"] {
            assert!(bad.parse::<Cost>().is_err(), "{bad}");
        }
        for (flags, part) in [
            ("--preset h100x", "neither one of h200"),
            ("--accepted 0", "--accepted"),
            ("--noise 1.5", "--noise"),
            ("--kv-gbps 0", "--kv-gbps"),
            ("--kv-latency-ms nan", "--kv-latency-ms"),
        ] {
            let args = model_args(flags);
            let error = args.engine().and_then(|engine| args.terms(&engine)).unwrap_err().0;
            assert!(error.contains(part), "{error}");
        }
    }
}
