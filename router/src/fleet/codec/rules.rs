//! What the types of a frame cannot say: lengths that have to fit each other. Checked for every frame that is read.

use super::msgpack::{Fault, Read};
use crate::core::frame::{
    Continue, Fetch, Grammar, KvReady, MAX_GRAMMAR_BYTES, MAX_MARKER_TOKENS, MAX_REQUEST_ID_BYTES,
    MAX_TICKET_BYTES, NAME_BYTES, Offer, Reasoning, Refuse, Submit, Ticket, TokenLimits,
};

pub(super) fn kv_ready(frame: &KvReady) -> Read<()> {
    ticket(&frame.ticket)
}

pub(super) fn offer(frame: &Offer) -> Read<()> {
    ticket(&frame.ticket)?;
    let blocks = tree(&frame.names, &frame.parents)?;
    one_each("hits", frame.hits.len(), blocks)
}

pub(super) fn pass_on(frame: &Ticket) -> Read<()> {
    ticket(&frame.ticket)
}

pub(super) fn go_on(frame: &Continue) -> Read<()> {
    units("generated", frame.generated.len(), 4).map(|_| ())
}

pub(super) fn fetch(frame: &Fetch) -> Read<()> {
    ticket(&frame.ticket)?;
    let blocks = tree(&frame.names, &frame.parents)?;
    one_each("offset", frame.offset.len(), blocks)
}

/// It stands in logs.
pub(super) fn submit(frame: &Submit) -> Read<()> {
    let id = &frame.request_id;
    if id.len() > MAX_REQUEST_ID_BYTES || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
        let expected = format!("at most {MAX_REQUEST_ID_BYTES} visible characters");
        return Err(Fault::malformed(expected, format_args!("{id:?}")).inside("request_id"));
    }
    Ok(())
}

/// A worker that is to come back is told when, and no other.
pub(super) fn refuse(frame: &Refuse) -> Read<()> {
    let fault = match (frame.reason.says_when(), frame.retry_after_ms) {
        (true, Some(_)) | (false, None) => return Ok(()),
        (true, None) => Fault::malformed(format_args!("a time for {}", frame.reason), "nil"),
        (false, Some(ms)) => Fault::malformed(format_args!("nil for {}", frame.reason), ms),
    };
    Err(fault.inside("retry_after_ms"))
}

pub(super) fn grammar(frame: &Grammar) -> Read<()> {
    if frame.source.len() > MAX_GRAMMAR_BYTES {
        let expected = format!("at most {MAX_GRAMMAR_BYTES} bytes");
        return Err(Fault::malformed(expected, frame.source.len()).inside("source"));
    }
    Ok(())
}

/// What ends reasoning has to be there, and not yet, and all markers are short.
pub(super) fn reasoning(frame: &Reasoning) -> Read<()> {
    let markers =
        [("begin", &frame.begin, 0), ("end", &frame.end, 1), ("ends_too", &frame.ends_too, 0)];
    for (name, marker, least) in markers {
        if !(least..=MAX_MARKER_TOKENS).contains(&marker.len()) {
            let expected = format!("{least} to {MAX_MARKER_TOKENS} items");
            return Err(Fault::malformed(expected, marker.len()).inside(name));
        }
    }
    if frame.begun as usize >= frame.end.len() {
        let expected = format!("less than the {} of `end`", frame.end.len());
        return Err(Fault::malformed(expected, frame.begun).inside("begun"));
    }
    Ok(())
}

pub(super) fn token_limits(limits: &TokenLimits) -> Read<()> {
    let tokens: u64 = limits.lengths.iter().copied().map(u64::from).sum();
    if limits.lengths.contains(&0) || tokens != limits.banned.len() as u64 {
        let expected = format!("lengths above 0, {} together", limits.banned.len());
        return Err(Fault::malformed(expected, tokens).inside("lengths"));
    }
    Ok(())
}

fn ticket(ticket: &[u8]) -> Read<()> {
    if ticket.len() > MAX_TICKET_BYTES {
        let expected = format!("at most {MAX_TICKET_BYTES} bytes");
        return Err(Fault::malformed(expected, ticket.len()).inside("ticket"));
    }
    Ok(())
}

/// Blocks with these names, each of whose parents stands before it.
fn tree(names: &[u8], parents: &[i32]) -> Read<usize> {
    let blocks = units("names", names.len(), NAME_BYTES)?;
    one_each("parents", parents.len(), blocks)?;
    for (place, &parent) in parents.iter().enumerate() {
        let before = parent == -1 || usize::try_from(parent).is_ok_and(|parent| parent < place);
        if !before {
            let expected = format!("-1 or a place before {place}");
            return Err(Fault::malformed(expected, parent).at(place).inside("parents"));
        }
    }
    Ok(blocks)
}

fn units(field: &str, len: usize, unit: usize) -> Read<usize> {
    if !len.is_multiple_of(unit) {
        let expected = format!("a multiple of {unit} bytes");
        return Err(Fault::malformed(expected, len).inside(field));
    }
    Ok(len / unit)
}

fn one_each(field: &str, got: usize, blocks: usize) -> Read<()> {
    if got != blocks {
        return Err(Fault::malformed(format!("{blocks} items"), got).inside(field));
    }
    Ok(())
}
