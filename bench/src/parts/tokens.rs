//! Prompts to tokens alone: the encoder that is written out against the crate `tokenizers`, in turns, without a router.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use headrace_router::config::STRETCH_BYTES;
use headrace_router::prompt::{
    ChatPrompt, ModelDoc, PrefixCache, Prompt, PromptEngine, TokenizePool,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::BadInput;
use crate::random::Random;
use crate::report::stats::Quantiles;

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Prompts to tokens, measured without a router.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TokensArgs {
    /// `tokenizer.json` of a model whose tokenizer is BPE on bytes.
    #[arg(long)]
    tokenizer: PathBuf,
    /// Files with the text that prompts are cut from.
    #[arg(required = true)]
    text: Vec<PathBuf>,
    /// Turns of each encoder in each case.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Prompts of the case with this number alone, on the fast encoder, so many: for a profiler.
    #[arg(long, num_args = 2, value_names = ["CASE", "PROMPTS"])]
    only: Vec<usize>,
}

/// Result of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    cases: Vec<CaseReport>,
    /// Milliseconds of short chats beside eight tasks that send prompts of 50,000 words, each a new one.
    beside_long_ms: Beside,
}

#[derive(Debug, Serialize)]
struct Beside {
    tokenizers: Option<Quantiles>,
    fast: Option<Quantiles>,
}

#[derive(Debug, Serialize)]
struct CaseReport {
    case: &'static str,
    words: usize,
    /// Of one prompt, about.
    tokens: usize,
    /// Microseconds on a core for one prompt, all threads together.
    tokenizers_us: Spread,
    fast_us: Spread,
    /// Microseconds a token, the least of the rounds.
    tokenizers_us_per_token: f64,
    fast_us_per_token: f64,
}

#[derive(Debug, Serialize)]
struct Spread {
    min: f64,
    median: f64,
}

struct Case {
    name: &'static str,
    /// At the beginning of every prompt.
    shared: usize,
    own: usize,
    /// Bytes of the cache; `tokenizers` has none where the prefix is shared, as it was never found inside a message.
    cache: [usize; 2],
    /// Prompts of a turn.
    prompts: [usize; 2],
}

const CACHE: usize = 64 << 20;

const CASES: [Case; 4] = [
    Case { name: "short chat", shared: 0, own: 32, cache: [CACHE, CACHE], prompts: [1_500, 6_000] },
    Case { name: "8,000 words, new", shared: 0, own: 8_000, cache: [0, 0], prompts: [15, 200] },
    Case {
        name: "8,000 words, 7,500 of them shared inside the message",
        shared: 7_500,
        own: 500,
        cache: [0, CACHE],
        prompts: [15, 600],
    },
    Case {
        name: "100,000 words, 99,500 of them shared inside the message",
        shared: 99_500,
        own: 500,
        cache: [0, CACHE],
        prompts: [2, 60],
    },
];

/// Runs all of it.
///
/// # Errors
/// A file cannot be read, the encoder does not know the tokenizer, or there is no `/proc`.
pub(crate) fn run(args: &TokensArgs) -> anyhow::Result<Report> {
    let read =
        |path: &PathBuf| std::fs::read_to_string(path).with_context(|| path.display().to_string());
    let text = args.text.iter().map(read).collect::<anyhow::Result<Vec<String>>>()?.join("\n\n");
    let words = Words { ends: ends(&text), text };
    let fast: Value = serde_json::from_str(&read(&args.tokenizer)?)?;
    // a tokenizer with a token for bytes that it lacks is none of those written out; its tokens of text are the same
    let mut slow = fast.clone();
    slow["model"]["unk_token"] = json!("<|endoftext|>");
    let files = [slow.to_string(), fast.to_string()];
    if let [case, prompts] = args.only[..] {
        let case = CASES.get(case).ok_or_else(|| BadInput("there is no such case".to_owned()))?;
        case.measure(&engine(&files[1], case.cache[1])?.0, &words, prompts, 0)?;
        return Ok(Report {
            cases: Vec::new(),
            beside_long_ms: Beside { tokenizers: None, fast: None },
        });
    }
    let cases = CASES.iter().map(|case| case.run(&files, &words, args.rounds));
    let cases = cases.collect::<anyhow::Result<_>>()?;
    let [tokenizers, fast] = [beside(&files[0], &words)?, beside(&files[1], &words)?];
    Ok(Report { cases, beside_long_ms: Beside { tokenizers, fast } })
}

/// The text, and where its words end.
struct Words {
    text: String,
    ends: Vec<usize>,
}

fn ends(text: &str) -> Vec<usize> {
    let spaces = text.char_indices().filter(|(_, c)| *c == ' ').map(|(at, _)| at);
    spaces.collect()
}

impl Words {
    /// So many words from a place on, in a circle.
    fn take(&self, from: usize, mut count: usize) -> String {
        let (mut out, mut at) = (String::new(), from % (self.ends.len() - 1));
        while count > 0 {
            let end = (at + count).min(self.ends.len() - 1);
            out.push_str(&self.text[self.ends[at]..self.ends[end]]);
            count -= end - at;
            at = 0;
        }
        out
    }
}

fn engine(tokenizer: &str, cache: usize) -> anyhow::Result<(PromptEngine, Arc<TokenizePool>)> {
    let doc = json!({
        "tokenizer": tokenizer, "chat_template": CHATML, "context_tokens": 1 << 20, "vocab_size": 1 << 20,
    });
    let doc = ModelDoc::parse(doc.to_string().as_bytes())?;
    let pool = Arc::new(TokenizePool::new(1, 64)?);
    let cache = PrefixCache::new(cache);
    Ok((PromptEngine::with_cache(doc, Arc::clone(&pool), cache, STRETCH_BYTES)?, pool))
}

fn chat(content: &str) -> Prompt {
    Prompt::Chat(Box::new(ChatPrompt {
        messages: vec![json!({"role": "user", "content": content})],
        add_generation_prompt: true,
        ..ChatPrompt::default()
    }))
}

impl Case {
    fn run(&self, files: &[String; 2], words: &Words, rounds: usize) -> anyhow::Result<CaseReport> {
        let engines = [engine(&files[0], self.cache[0])?.0, engine(&files[1], self.cache[1])?.0];
        for (engine, encoder) in engines.iter().zip(["tokenizers", "fast"]) {
            if engine.cache_stats().encoder() != encoder {
                let why = engine.cache_stats().slow.unwrap_or("it knows it");
                return Err(BadInput(format!("no comparison is possible: {why}")).into());
            }
            self.measure(engine, words, 3, usize::MAX)?;
        }
        let (mut took, mut tokens) = ([Vec::new(), Vec::new()], [0, 0]);
        for round in 0..rounds {
            for which in [0, 1] {
                let prompts = self.prompts[which];
                let (us, mean) = self.measure(&engines[which], words, prompts, round)?;
                took[which].push(us);
                tokens[which] = mean;
            }
        }
        let [tokenizers_us, fast_us] = took.map(Spread::of);
        Ok(CaseReport {
            case: self.name,
            words: self.shared + self.own,
            tokens: tokens[1],
            tokenizers_us_per_token: tokenizers_us.min / tokens[0] as f64,
            fast_us_per_token: fast_us.min / tokens[1] as f64,
            tokenizers_us,
            fast_us,
        })
    }

    /// Microseconds on a core and tokens of one prompt.
    fn measure(
        &self,
        engine: &PromptEngine,
        words: &Words,
        prompts: usize,
        round: usize,
    ) -> anyhow::Result<(f64, usize)> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let mut random = Random::new(round as u64);
        let shared = words.take(0, self.shared);
        let prompt = |i: usize| {
            let own = words.take(random.below(words.ends.len()), self.own);
            chat(&format!("{shared} {round} {i}:{own}"))
        };
        let all: Vec<Prompt> = (0..prompts).map(prompt).collect();
        let (before, mut tokens) = (cpu_ns()?, 0);
        for prompt in all {
            tokens += runtime.block_on(engine.encode(prompt))?.len();
        }
        Ok(((cpu_ns()? - before) as f64 / 1e3 / prompts as f64, tokens / prompts))
    }
}

impl Spread {
    fn of(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        Self { min: all[0], median: all[all.len() / 2] }
    }
}

/// Short chats beside eight tasks with long ones.
fn beside(tokenizer: &str, words: &Words) -> anyhow::Result<Option<Quantiles>> {
    const SHORT: usize = 200;
    let (engine, pool) = engine(tokenizer, CACHE)?;
    let engine = Arc::new(engine);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
    let over = Arc::new(AtomicBool::new(false));
    let long: Vec<_> = (0..8)
        .map(|task| {
            let (engine, over) = (Arc::clone(&engine), Arc::clone(&over));
            let texts: Vec<String> =
                (0..4).map(|i| words.take(997 * (4 * task + i), 50_000)).collect();
            runtime.spawn(async move {
                for turn in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let text = format!("{task} {turn} {}", texts[turn % texts.len()]);
                    engine.encode(chat(&text)).await.ok();
                }
            })
        })
        .collect();
    let samples = runtime.block_on(async {
        while pool.queued() < 7 {
            tokio::task::yield_now().await;
        }
        let short = tokio::spawn(async move {
            let mut samples = Vec::new();
            for i in 0..SHORT {
                let prompt = chat(&format!(
                    "{i} What is the capital of France, and how far is it from here?"
                ));
                let start = Instant::now();
                engine.encode(prompt).await?;
                samples.push(start.elapsed());
                std::thread::sleep(Duration::from_millis(3));
            }
            Ok::<_, headrace_router::error::RouteError>(samples)
        });
        let samples = short.await;
        over.store(true, Ordering::Relaxed);
        for task in long {
            task.await.ok();
        }
        samples
    })??;
    Ok(Quantiles::of(&samples))
}

/// Nanoseconds that the threads of this process had a core.
fn cpu_ns() -> anyhow::Result<u64> {
    let mut sum = 0;
    for thread in std::fs::read_dir("/proc/self/task")? {
        let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        let first = stat.split(' ').next().context("odd schedstat")?;
        sum += first.parse::<u64>()?;
    }
    Ok(sum)
}
