//! Azure's format: arrival times and lengths, nothing about the content, so no two prompts share anything.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use super::{Lines, Requests, Row, in_order};
use crate::BadInput;

/// Columns of our packing and of the original, in the order time, input, output.
const HEADERS: [[&str; 3]; 2] = [
    ["timestamp_ms", "input_length", "output_length"],
    ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
];
/// Any size would do: no block is ever seen twice.
const BLOCK_TOKENS: u32 = 512;

pub(super) fn parse(lines: &Lines) -> Result<Requests, BadInput> {
    let (first, header) = &lines.rows[0];
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    if !HEADERS.iter().any(|known| known[..] == columns[..]) {
        let known = HEADERS.map(|names| names.join(",")).join("` or `");
        let why = format!("neither JSON nor the columns `{known}`, but `{}`", clip(header));
        return Err(lines.bad(*first, why));
    }
    let mut next_block = 0;
    let mut rows = Vec::with_capacity(lines.rows.len() - 1);
    for (number, line) in &lines.rows[1..] {
        rows.push(row(line, &columns, &mut next_block).map_err(|why| lines.bad(*number, why))?);
    }
    if rows.is_empty() {
        return Err(BadInput(format!("{}: the trace is empty", lines.file)));
    }
    let numbers: Vec<usize> = lines.rows[1..].iter().map(|(number, _)| *number).collect();
    in_order(lines, &numbers, &mut rows)?;
    Ok(Requests { name: lines.name(), block_tokens: BLOCK_TOKENS, rows })
}

fn row(line: &str, columns: &[&str], next_block: &mut u64) -> Result<Row, String> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let [time, input, output] = cells[..] else {
        return Err(format!("{} columns instead of {}", cells.len(), columns.len()));
    };
    let at_ms = match columns[0] {
        "timestamp_ms" => time.parse::<f64>().ok().filter(|ms| ms.is_finite() && *ms >= 0.0),
        _ => date_ms(time),
    };
    let at_ms = at_ms.ok_or_else(|| format!("`{}` is \"{time}\", not a time", columns[0]))?;
    let length = |name: &str, cell: &str| {
        let value = cell.parse::<u32>().ok().filter(|n| *n > 0);
        value.ok_or_else(|| format!("`{name}` is \"{cell}\", not a whole number from 1 on"))
    };
    let (input_tokens, output_tokens) = (length(columns[1], input)?, length(columns[2], output)?);
    let blocks = u64::from(input_tokens.div_ceil(BLOCK_TOKENS));
    let own = *next_block..*next_block + blocks;
    *next_block = own.end;
    Ok(Row { at_ms, input_tokens, output_tokens, blocks: own.collect(), session: None })
}

/// `2023-11-16 18:15:46.6805900`, with an offset or in UTC, in ms from 1970 on.
fn date_ms(text: &str) -> Option<f64> {
    let at = text.parse::<Timestamp>().ok().or_else(|| {
        let civil: DateTime = text.parse().ok()?;
        civil.to_zoned(TimeZone::UTC).ok().map(|zoned| zoned.timestamp())
    })?;
    Some(at.as_nanosecond() as f64 / 1e6)
}

fn clip(text: &str) -> String {
    text.chars().take(60).collect()
}
