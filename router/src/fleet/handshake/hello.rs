//! What a Hello may say.

use std::fmt::Display;

use super::{Misfit, NONCE_BYTES};
use crate::core::blocks::HASH_SCHEME;
use crate::core::frame::{Group, Hello, Role, StepCost};

/// Longest name of a worker or model.
pub(super) const NAME_BYTES: usize = 256;
/// Further names of a model.
const ALIASES: usize = 16;
/// More of anything than a worker can have.
const SANE: u32 = 1 << 30;
/// More KV blocks than a device can have: of one token each, they would be two terabytes of 32 KiB.
const SANE_BLOCKS: u32 = 1 << 26;
/// Ways to pull KV from one worker.
const TRANSFER_WAYS: usize = 16;
/// More ranks than a group of experts can have.
const SANE_RANKS: u32 = 4096;
/// More bytes than a KV block can have.
const SANE_BLOCK_BYTES: u64 = 1 << 32;
/// More values than a hidden state can have.
const SANE_WIDTH: u32 = 1 << 16;
/// More ms than a token, a row or a step can cost.
const SANE_MS: f64 = 1e6;

/// What can be said of a Hello without knowing the fleet.
///
/// # Errors
/// The first field that cannot be. That the version is ours the codec saw to.
pub(super) fn check(hello: &Hello) -> Result<(), Misfit> {
    let (prints, capacity) = (&hello.fingerprints, &hello.capacity);
    for (field, text) in [
        ("worker", &hello.worker),
        ("model", &hello.model),
        ("fingerprints.weights", &prints.weights),
        ("fingerprints.tokenizer", &prints.tokenizer),
        ("fingerprints.chat_template", &prints.chat_template),
        ("fingerprints.kv_layout", &prints.kv_layout),
        ("dtype", &hello.dtype),
    ] {
        let fine = (1..=NAME_BYTES).contains(&text.len()) && !text.chars().any(char::is_control);
        require(fine, field, &"1 to 256 bytes of printable text", text, "name it otherwise")?;
    }
    check_aliases(hello)?;
    check_transfer(hello)?;
    require(
        prints.hash_scheme == HASH_SCHEME,
        "fingerprints.hash_scheme",
        &HASH_SCHEME,
        &prints.hash_scheme,
        "use the same version on both sides",
    )?;
    for (field, n, least) in [
        ("fingerprints.block_tokens", prints.block_tokens, 1),
        ("capacity.sequences", capacity.sequences, 1),
        ("capacity.batched_tokens", capacity.batched_tokens, 1),
        ("capacity.waiting", capacity.waiting, 0),
        ("capacity.host_blocks", capacity.host_blocks, 0),
        ("capacity.disk_blocks", capacity.disk_blocks, 0),
        ("context_tokens", hello.context_tokens, 1),
    ] {
        let expected = format!("{least} to {SANE}");
        let fine = (least..=SANE).contains(&n);
        require(fine, field, &expected, &n, "no worker has that many")?;
    }
    let fine = (1..=SANE_BLOCKS).contains(&capacity.blocks);
    let expected = format!("1 to {SANE_BLOCKS}");
    require(fine, "capacity.blocks", &expected, &capacity.blocks, "no device has that many")?;
    let (fine, expected) = (hello.pooled_width <= SANE_WIDTH, format!("0 to {SANE_WIDTH}"));
    require(fine, "pooled_width", &expected, &hello.pooled_width, "no model is that wide")?;
    if let Some(prior) = &hello.step_prior {
        let StepCost { fixed_ms, prefill_ms, context_ms, row_ms, kv_ms } = *prior;
        let costs = [fixed_ms, prefill_ms, context_ms, row_ms, kv_ms];
        let fine = costs.iter().all(|ms| (0.0..=SANE_MS).contains(ms)); // NaN is in no range
        let fine = fine && costs.iter().sum::<f64>() > 0.0;
        let (expected, got) =
            ("five costs of 0 to 1e6 ms, not all of them 0", format!("{costs:?}"));
        require(fine, "step_prior", &expected, &got, "measure again, or send none")?;
    }
    if let Some(group) = &hello.group {
        check_group(group)?;
    }
    let got = format!("{} bytes", hello.nonce.len());
    let fine = hello.nonce.len() == NONCE_BYTES;
    require(fine, "nonce", &"16 bytes", &got, "send 16 random bytes")
}

fn check_aliases(hello: &Hello) -> Result<(), Misfit> {
    let names = &hello.aliases;
    let printable = |name: &String| {
        (1..=NAME_BYTES).contains(&name.len()) && !name.chars().any(char::is_control)
    };
    let twice = |(i, name): (usize, &String)| *name == hello.model || names[..i].contains(name);
    let fine = names.len() <= ALIASES
        && names.iter().all(printable)
        && !names.iter().enumerate().any(twice);
    let expected = format!("at most {ALIASES} further names, each once");
    let got = format!("{} names", names.len());
    require(fine, "aliases", &expected, &got, "check --served-model-name")
}

fn check_group(group: &Group) -> Result<(), Misfit> {
    for (field, text, least) in
        [("group.id", &group.id, 1), ("group.transport", &group.transport, 0)]
    {
        let fine =
            (least..=NAME_BYTES).contains(&text.len()) && !text.chars().any(char::is_control);
        let expected = format!("{least} to {NAME_BYTES} bytes of printable text");
        require(fine, field, &expected, text, "name it otherwise")?;
    }
    let expected = format!("a rank below the size, which is {SANE_RANKS} at most");
    let got = format!("rank {} of {}", group.rank, group.size);
    let fine = group.rank < group.size && group.size <= SANE_RANKS;
    require(fine, "group", &expected, &got, "check how many ranks the group was started with")
}

/// A prefill worker is of use only to those who can pull from it.
fn check_transfer(hello: &Hello) -> Result<(), Misfit> {
    let ways = &hello.transfer;
    let text = format!("{} ways", ways.len());
    let fine = |way: &String| {
        way.len() <= NAME_BYTES && way.contains(':') && !way.chars().any(char::is_control)
    };
    require(
        ways.len() <= TRANSFER_WAYS && ways.iter().all(fine),
        "transfer",
        &format!("at most {TRANSFER_WAYS} addresses such as tcp:HOST:PORT"),
        &text,
        "check --transfer-host",
    )?;
    let moves = !ways.is_empty() && hello.kv_block_bytes > 0;
    require(
        hello.role != Role::Prefill || moves,
        "transfer",
        &"a way to pull KV from a prefill worker",
        &text,
        "start it without --no-transfer, or with --role both",
    )?;
    require(
        hello.kv_block_bytes <= SANE_BLOCK_BYTES,
        "kv_block_bytes",
        &format!("0 to {SANE_BLOCK_BYTES}"),
        &hello.kv_block_bytes,
        "no block is that large",
    )
}

fn require(
    fine: bool,
    field: &str,
    expected: &dyn Display,
    got: &dyn Display,
    message: &'static str,
) -> Result<(), Misfit> {
    if fine {
        return Ok(());
    }
    Err(Misfit {
        field: field.into(),
        expected: expected.to_string(),
        got: got.to_string(),
        message,
    })
}
