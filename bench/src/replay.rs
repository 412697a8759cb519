//! `bench replay`: the requests of a trace at their times, whatever the server does.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::BadInput;
use crate::bound::bound_hit_rate;
use crate::client::body::{Asker, Prompt};
use crate::client::{Client, ClientArgs};
use crate::drive::{Arrivals, Run, Turn, arrival_times, conversations, open_loop};
use crate::load::{at_least_one, positive, vocab};
use crate::progress::Progress;
use crate::random::Random;
use crate::report::sample::{Answer, Slo};
use crate::report::{Output, Report, Setting};
use crate::trace::{Conversation, Requests, Scale, Slice, Trace, name_of, read};

/// A trace against an endpoint.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ReplayArgs {
    /// Block-id JSON lines (Mooncake), CSV with lengths (Azure), or chat JSON lines; plain or gzip.
    trace: PathBuf,
    #[command(flatten)]
    client: ClientArgs,

    #[command(flatten, next_help_heading = "When")]
    slice: Slice,
    /// Send everything so many times as fast as it was recorded.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive, help_heading = "When")]
    speed: f64,
    /// The fleet is `headrace mock --speed X`, with a clock that runs X times as fast: requests go out X times as fast
    /// too, and the report is in the fleet's time.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive, help_heading = "When")]
    mock_speed: f64,
    /// Of a chat trace: conversations that begin per second, before --speed.
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = positive, help_heading = "When")]
    rate: f64,
    /// Of a chat trace: equal seeds are equal times.
    #[arg(long, default_value_t = 0, help_heading = "When")]
    seed: u64,

    /// Make prompts N times shorter, block by block, so that reuse stays the same.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "What")]
    scale: u32,
    /// Make answers N times shorter.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "What")]
    output_scale: u32,
    /// The fleet is `headrace mock --accepted 1/N`, where a token of an answer takes as long as N: times per token are
    /// those of one of the N.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = "What")]
    mock_tokens: u32,
    /// Tokens of the trace's blocks [default: what fits the rows].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "What")]
    block_tokens: Option<u32>,
    /// Token ids are below this.
    #[arg(long, default_value_t = 32_000, value_parser = vocab, help_heading = "What")]
    vocab: u32,

    /// Limits of a good answer, such as ttft=1s,tpot=50ms; errors and rejections are misses.
    #[arg(long, help_heading = "Report")]
    slo: Option<Slo>,
    /// Name of the router's policy, for the report.
    #[arg(long, help_heading = "Report")]
    policy: Option<String>,
    /// Workers that there are.
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Report")]
    workers: Option<usize>,
    /// Blocks of the trace in each worker's cache; with --workers, the best hit rate that one cache could have.
    #[arg(long, value_name = "N", requires = "workers", help_heading = "Report")]
    blocks: Option<usize>,
    #[command(flatten)]
    output: Output,
}

/// Sends the trace, waits for the last answer, and prints the report.
///
/// # Errors
/// [`BadInput`] for a bad trace, before anything is sent. The endpoint cannot be reached or names no model, or no
/// request was answered. Failures of single requests are counted.
pub(crate) async fn run(args: ReplayArgs) -> anyhow::Result<()> {
    let trace = read(&args.trace, args.block_tokens)?;
    let client = Arc::new(Client::new(&args.client, args.mock_speed)?);
    let plan = Plan::new(&args, trace)?;
    let model = client.model_for("replay", &args.client).await?;
    let asker = Asker { model, priority: args.client.priority, unary: false };
    let (mut run, setting) = match plan {
        Plan::Requests(requests, scale) => {
            let run = send(&args, &client, &asker, &requests, scale).await?;
            let cache = args.workers.zip(args.blocks).map(|(workers, blocks)| workers * blocks);
            let span_s = requests.rows.last().map_or(0.0, |row| row.at_ms / args.speed / 1e3);
            let setting = Setting {
                trace: Some(requests.name.clone()),
                bound_hit_rate: cache.map(|blocks| bound_hit_rate(&requests, blocks)),
                offered_per_s: Some(requests.rows.len() as f64 / span_s).filter(|r| r.is_finite()),
                ..Setting::default()
            };
            (run, setting)
        }
        Plan::Chat(all) => {
            let run = talk(&args, &client, &asker, &all).await;
            (run, Setting { trace: Some(name_of(&args.trace)), ..Setting::default() })
        }
    };
    for sample in &mut run.samples {
        if let Ok(answer) = &mut sample.result {
            of_one_token(answer, args.mock_tokens);
        }
    }
    let setting = Setting {
        mode: "live",
        policy: args.policy.clone(),
        workers: args.workers,
        slo: args.slo,
        wall_s: run.elapsed_s * args.mock_speed,
        client_cpu: run.client_cpu(),
        ..setting
    };
    args.output.write(&Report::new(setting, &run.samples))
}

/// Makes the times after the first token those of tokens of which `stands_for` went into one.
fn of_one_token(answer: &mut Answer, stands_for: u32) {
    let share = 1.0 / f64::from(stands_for);
    answer.last_ms = answer.ttft_ms + (answer.last_ms - answer.ttft_ms) * share;
    for gap_ms in &mut answer.gaps_ms {
        *gap_ms *= share as f32;
    }
}

/// What is sent, checked against the arguments.
enum Plan {
    Requests(Requests, Scale),
    Chat(Vec<Conversation>),
}

impl Plan {
    fn new(args: &ReplayArgs, trace: Trace) -> Result<Self, BadInput> {
        match trace {
            Trace::Requests(requests) => {
                let requests = requests.slice(&args.slice)?;
                let scale = Scale::new(&requests, args.scale, args.output_scale)?;
                Ok(Self::Requests(requests, scale))
            }
            Trace::Chat(_) if args.scale != 1 || args.slice != Slice::default() => {
                let file = args.trace.display();
                let why = "a trace of messages cannot be sliced by time or scaled";
                Err(BadInput(format!("{file}: {why}; cut the file instead")))
            }
            Trace::Chat(all) => Ok(Self::Chat(all)),
        }
    }
}

async fn send(
    args: &ReplayArgs,
    client: &Arc<Client>,
    asker: &Asker,
    requests: &Requests,
    scale: Scale,
) -> std::io::Result<Run> {
    let times: Vec<Duration> = requests.rows.iter().map(|row| args.real_time(row.at_ms)).collect();
    let request = |i: usize| {
        let row = &requests.rows[i];
        let prompt = Prompt::Tokens(scale.prompt(row, args.vocab));
        asker.request(&prompt, None, scale.output_tokens(row), Some(row.session_key()))
    };
    let progress = Arc::new(Progress::new("replay", times.len()));
    open_loop(client, &times, request, &progress).await
}

async fn talk(args: &ReplayArgs, client: &Arc<Client>, asker: &Asker, all: &[Conversation]) -> Run {
    let mut random = Random::new(args.seed);
    let starts = arrival_times(Arrivals::Poisson, args.rate, all.len(), Duration::MAX, &mut random);
    let turns = |conversation: &Conversation| -> Vec<Turn> {
        let turn = |turn: &crate::trace::Turn| {
            let prompt = Prompt::Messages(conversation.messages[..turn.messages].to_vec());
            let max_tokens = turn.output_tokens.div_ceil(args.output_scale);
            let session = Some(conversation.session.clone());
            let tools = conversation.tools.as_ref();
            let request = asker.request(&prompt, tools, max_tokens, session);
            (request, args.real_time(turn.delay_s * 1e3))
        };
        conversation.turns.iter().map(turn).collect()
    };
    let starts = starts.iter().map(|start| args.real_time(start.as_secs_f64() * 1e3));
    let plan: Vec<_> = starts.zip(all.iter().map(turns)).collect();
    let count = plan.iter().map(|(_, turns)| turns.len()).sum();
    let progress = Arc::new(Progress::new("replay", count));
    conversations(client, plan, &progress).await
}

impl ReplayArgs {
    /// On this machine's clock.
    fn real_time(&self, trace_ms: f64) -> Duration {
        Duration::from_secs_f64(trace_ms / 1e3 / self.speed / self.mock_speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_stand_for_several_count_as_these() {
        let mut answer = Answer {
            ttft_ms: 100.0,
            last_ms: 420.0,
            gaps_ms: vec![160.0, 160.0],
            completion_tokens: 3,
            ..Answer::default()
        };
        of_one_token(&mut answer, 32);
        assert_eq!((answer.ttft_ms, answer.tpot_ms()), (100.0, Some(5.0)));
        assert_eq!(answer.gaps_ms, [5.0, 5.0]);
    }
}
