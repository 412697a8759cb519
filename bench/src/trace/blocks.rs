//! Mooncake's format: a JSON object a line, with an id for each block of the prompt.

use serde_json::{Map, Value};

use super::{Lines, Requests, Row, in_order};
use crate::BadInput;

/// What a block may have where the file does not say.
const LIKELY_BLOCK_TOKENS: [u32; 12] = [512, 16, 64, 32, 128, 256, 8, 1024, 2048, 4, 2, 1];

pub(super) fn parse(lines: &Lines, block_tokens: Option<u32>) -> Result<Requests, BadInput> {
    let mut rows = Vec::with_capacity(lines.rows.len());
    for (number, line) in &lines.rows {
        rows.push(row(line).map_err(|why| lines.bad(*number, why))?);
    }
    let numbers: Vec<usize> = lines.rows.iter().map(|(number, _)| *number).collect();
    in_order(lines, &numbers, &mut rows)?;
    let block_tokens = block_tokens.unwrap_or_else(|| likely_block_tokens(&rows));
    for (number, row) in numbers.iter().zip(&rows) {
        if !fits(row, block_tokens) {
            let (have, tokens) = (row.blocks.len(), row.input_tokens);
            let need = tokens.div_ceil(block_tokens);
            let why = format!(
                "`hash_ids` has {have} ids, but `input_length` {tokens} makes {need} blocks of {block_tokens} tokens"
            );
            return Err(lines.bad(*number, why));
        }
    }
    Ok(Requests { name: lines.name(), block_tokens, rows })
}

/// The last block may be there for less than a whole token, where lengths were rounded down.
fn fits(row: &Row, block_tokens: u32) -> bool {
    let (have, tokens) = (row.blocks.len() as u64, u64::from(row.input_tokens));
    let block = u64::from(block_tokens);
    have == tokens.div_ceil(block) || have == tokens / block + 1
}

/// The size that fits the most rows: one wrong row must not change the meaning of all others.
fn likely_block_tokens(rows: &[Row]) -> u32 {
    let fitting = |size: &u32| rows.iter().filter(|row| fits(row, *size)).count();
    // of equally good sizes the first wins
    LIKELY_BLOCK_TOKENS.into_iter().rev().max_by_key(fitting).expect("the list is not empty")
}

fn row(line: &str) -> Result<Row, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    let Value::Object(fields) = value else { return Err("not a JSON object".into()) };
    let at_ms = match field(&fields, "timestamp")? {
        Value::Number(number) => number.as_f64().filter(|ms| *ms >= 0.0),
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            None
        }
    };
    let Value::Array(ids) = field(&fields, "hash_ids")? else {
        return Err("`hash_ids` must be an array".into());
    };
    let blocks = ids.iter().enumerate().map(|(i, id)| {
        id.as_u64().ok_or_else(|| format!("`hash_ids[{i}]` is {id}, not a number from 0 on"))
    });
    Ok(Row {
        at_ms: at_ms.ok_or_else(|| wrong(&fields, "timestamp", "a number of ms from 0 on"))?,
        input_tokens: length(&fields, "input_length")?,
        output_tokens: length(&fields, "output_length")?,
        blocks: blocks.collect::<Result<_, _>>()?,
        session: session(&fields)?,
    })
}

fn field<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<&'a Value, String> {
    fields.get(name).ok_or_else(|| format!("`{name}` is missing"))
}

fn wrong(fields: &Map<String, Value>, name: &str, wanted: &str) -> String {
    format!("`{name}` is {}, not {wanted}", fields[name])
}

fn length(fields: &Map<String, Value>, name: &str) -> Result<u32, String> {
    let value = field(fields, name)?.as_u64().and_then(|n| u32::try_from(n).ok());
    value.filter(|n| *n > 0).ok_or_else(|| wrong(fields, name, "a whole number from 1 on"))
}

fn session(fields: &Map<String, Value>) -> Result<Option<String>, String> {
    match fields.get("session") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Number(number)) => Ok(Some(number.to_string())),
        Some(Value::Bool(_) | Value::Array(_) | Value::Object(_)) => {
            Err(wrong(fields, "session", "text or a number"))
        }
    }
}
