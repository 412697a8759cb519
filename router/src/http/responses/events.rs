//! A response as events, each with its number in the stream.

use bytes::{Bytes, BytesMut};
use serde_json::{Value, json};

use crate::error::RouteError;
use crate::http::reply::blocks::{
    Block, BlockKind, BlockOrder, BlockStep, KeptBlocks, scored_bytes,
};
use crate::http::reply::events::{Cancelled, EventWriter, comment, json, number};
use crate::http::reply::parts::PartReader;
use crate::http::reply::reject::Reject;
use crate::http::responses::keep::Keeper;
use crate::http::responses::object::{self, ItemExtras, ResponseStatus};
use crate::limits::memory::Refused;
use crate::request::{Delta, Usage};
use crate::response_store::RunningResponse;

/// What the end of an item takes beside the item: its text is said three times.
const SAID_AGAIN: usize = 3;

/// The events of one response.
#[derive(Debug)]
pub(super) struct ResponseEvents {
    reader: PartReader,
    order: BlockOrder,
    items: ItemEvents,
    begun: bool,
    status: ResponseStatus,
    /// Where it can be asked for while it runs.
    running: Option<RunningResponse>,
}

/// Those of its items, and all items so far.
#[derive(Debug)]
struct ItemEvents {
    keeper: Keeper,
    kept: KeptBlocks,
    /// Of the item that is open.
    id: String,
    sequence: u32,
}

impl ResponseEvents {
    pub(super) fn new(
        keeper: Keeper,
        kept: KeptBlocks,
        reader: PartReader,
        running: Option<RunningResponse>,
    ) -> Self {
        let items = ItemEvents { keeper, kept, id: String::new(), sequence: 0 };
        let status = ResponseStatus::InProgress;
        Self { reader, order: BlockOrder::default(), items, begun: false, status, running }
    }

    fn ended(
        &mut self,
        status: ResponseStatus,
        usage: Usage,
        remark: Option<String>,
        out: &mut BytesMut,
    ) {
        let usage = self.reader.with_reasoning(usage);
        let items = &mut self.items;
        let response = items.keeper.finish(&items.kept.blocks, status, usage);
        drop(self.running.take()); // whoever waits for its end finds it
        comment(remark, out);
        let name = match status {
            ResponseStatus::Completed => "response.completed",
            ResponseStatus::InProgress
            | ResponseStatus::Incomplete
            | ResponseStatus::Failed
            | ResponseStatus::Cancelled => "response.incomplete",
        };
        items.response(name, [&response.head, &response.output, &response.tail], out);
    }
}

impl EventWriter for ResponseEvents {
    fn delta(
        &mut self,
        delta: &Delta,
        _usage: Usage,
        out: &mut BytesMut,
    ) -> Result<(), RouteError> {
        let items = &mut self.items;
        if !std::mem::replace(&mut self.begun, true) {
            let head = items.keeper.head.clone();
            let tail = object::tail(ResponseStatus::InProgress, None, None);
            for name in ["response.created", "response.in_progress"] {
                items.response(name, [&head, &Bytes::from_static(b"[]"), &tail], out);
            }
        }
        let (parts, end) = self.reader.read(delta)?;
        items.kept.score(self.reader.take_scored());
        self.status = end.map_or(ResponseStatus::InProgress, |end| ResponseStatus::of(end.finish));
        // the end of the last item says how the response ended
        let mut step = |step| items.step(step, ResponseStatus::Completed, out);
        for part in parts {
            self.order.take(part, &mut step)?;
        }
        if self.status != ResponseStatus::InProgress {
            let status = self.status.of_item();
            self.order.finish(&mut |step| items.step(step, status, out))?;
        }
        Ok(())
    }

    fn ends_early(&mut self) -> bool {
        self.reader.ends_early()
    }

    fn end(&mut self, usage: Usage, remark: Option<String>, out: &mut BytesMut) {
        self.ended(self.status, usage, remark, out);
    }

    fn failed(&mut self, error: RouteError, out: &mut BytesMut) {
        let (code, message) = Reject::from(error).code_and_message();
        let items = &mut self.items;
        items.event(
            "error",
            &[("code", json!(code)), ("message", json!(message)), ("param", Value::Null)],
            out,
        );
        let output = items.keeper.output(&items.kept.blocks, ResponseStatus::Failed);
        let tail = object::tail(ResponseStatus::Failed, None, Some(("server_error", &message)));
        let head = items.keeper.head.clone();
        items.response("response.failed", [&head, &output, &tail], out);
    }

    fn cancelled(&self) -> Option<Cancelled> {
        Some(Box::pin(self.running.as_ref()?.cancelled()))
    }

    fn cancel(&mut self, usage: Usage, out: &mut BytesMut) {
        let items = &mut self.items;
        let status = ResponseStatus::Incomplete;
        if self.order.finish(&mut |step| items.step(step, status, out)).is_err() {
            // the text of the last item is in the response all the same
        }
        self.ended(ResponseStatus::Cancelled, usage, None, out);
    }
}

impl ItemEvents {
    fn step(
        &mut self,
        step: BlockStep,
        ends: ResponseStatus,
        out: &mut BytesMut,
    ) -> Result<(), RouteError> {
        let told = self.kept.blocks.last().map_or(0, |block| block.tokens.len());
        self.kept.keep(&step).map_err(Refused::answer)?;
        match step {
            BlockStep::Begins(kind) => self.begin(&kind, out),
            BlockStep::Text(text) => self.text(&text, told, out),
            BlockStep::Ends => return self.end(ends, out),
        }
        Ok(())
    }

    fn index(&self) -> usize {
        self.kept.blocks.len().saturating_sub(1)
    }

    fn begin(&mut self, kind: &BlockKind, out: &mut BytesMut) {
        let index = self.index();
        self.id = self.keeper.ids.item(object::prefix(kind), index);
        let block = Block::empty(kind.clone());
        self.open("response.output_item.added", out);
        self.place(false, out);
        out.extend_from_slice(b",\"item\":");
        object::item(&self.id, &block, ResponseStatus::InProgress, &ItemExtras::default(), out);
        close(out);
        if !matches!(kind, BlockKind::Call { .. }) {
            self.open("response.content_part.added", out);
            self.place(true, out);
            out.extend_from_slice(b",\"part\":");
            object::part(&block, &ItemExtras::default(), out);
            close(out);
        }
    }

    /// One per token: written by hand. The tokens of the block from `told` on are those of this text.
    fn text(&mut self, text: &str, told: usize, out: &mut BytesMut) {
        let Some(block) = self.kept.blocks.last() else { return };
        let (name, is_text) = match block.kind {
            BlockKind::Content => ("response.output_text.delta", true),
            BlockKind::Reasoning => ("response.reasoning_text.delta", true),
            BlockKind::Call { .. } => ("response.function_call_arguments.delta", false),
        };
        self.open(name, out);
        self.place(is_text, out);
        out.extend_from_slice(b",\"delta\":");
        json(out, text);
        if let Some(block) =
            self.kept.blocks.last().filter(|block| block.kind == BlockKind::Content)
        {
            self.keeper.extras.logprobs(&block.tokens[told..], out);
        }
        close(out);
    }

    fn end(&mut self, status: ResponseStatus, out: &mut BytesMut) -> Result<(), RouteError> {
        let Some(block) = self.kept.blocks.pop() else { return Ok(()) };
        let said = SAID_AGAIN * (block.text.len() + scored_bytes(&block.tokens));
        let charged = self.kept.memory.charge(said).map_err(Refused::answer);
        self.kept.blocks.push(block.clone());
        charged?;
        let (name, is_text, field): (_, _, &[u8]) = match &block.kind {
            BlockKind::Content => ("response.output_text.done", true, b",\"text\":"),
            BlockKind::Reasoning => ("response.reasoning_text.done", true, b",\"text\":"),
            BlockKind::Call { .. } => {
                ("response.function_call_arguments.done", false, b",\"arguments\":")
            }
        };
        self.open(name, out);
        self.place(is_text, out);
        out.extend_from_slice(field);
        json(out, &block.text);
        match &block.kind {
            BlockKind::Content => self.keeper.extras.logprobs(&block.tokens, out),
            BlockKind::Reasoning => {}
            BlockKind::Call { name, .. } => {
                out.extend_from_slice(b",\"name\":");
                json(out, name);
            }
        }
        close(out);
        if is_text {
            self.open("response.content_part.done", out);
            self.place(true, out);
            out.extend_from_slice(b",\"part\":");
            object::part(&block, &self.keeper.extras, out);
            close(out);
        }
        self.open("response.output_item.done", out);
        self.place(false, out);
        out.extend_from_slice(b",\"item\":");
        object::item(&self.id, &block, status, &self.keeper.extras, out);
        close(out);
        Ok(())
    }

    /// The beginning of an event, up to its number.
    fn open(&mut self, name: &str, out: &mut BytesMut) {
        for piece in ["event: ", name, "\ndata: {\"type\":\"", name, "\",\"sequence_number\":"] {
            out.extend_from_slice(piece.as_bytes());
        }
        number(out, self.sequence);
        self.sequence += 1;
    }

    /// Which item an event is about, and where in it.
    fn place(&self, in_content: bool, out: &mut BytesMut) {
        out.extend_from_slice(b",\"item_id\":");
        json(out, &self.id);
        out.extend_from_slice(b",\"output_index\":");
        number(out, u32::try_from(self.index()).unwrap_or(u32::MAX));
        if in_content {
            out.extend_from_slice(b",\"content_index\":0");
        }
    }

    /// An event about the response as a whole.
    fn response(&mut self, name: &str, pieces: [&Bytes; 3], out: &mut BytesMut) {
        self.open(name, out);
        out.extend_from_slice(b",\"response\":");
        for piece in pieces {
            out.extend_from_slice(piece);
        }
        close(out);
    }

    fn event(&mut self, name: &str, fields: &[(&str, Value)], out: &mut BytesMut) {
        self.open(name, out);
        for (field, value) in fields {
            out.extend_from_slice(b",");
            json(out, field);
            out.extend_from_slice(b":");
            json(out, value);
        }
        close(out);
    }
}

fn close(out: &mut BytesMut) {
    out.extend_from_slice(b"}\n\n");
}

#[cfg(test)]
mod tests;
