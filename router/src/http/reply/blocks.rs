//! The parts of an answer as blocks, one after the other: what Anthropic calls content blocks and OpenAI's Responses calls
//! output items.

use crate::http::reply::blocks::BlockStep::{Begins, Ends, Text};
use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare, Refused};
use crate::output::Part;
use crate::request::ScoredToken;

/// What a block is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::http) enum BlockKind {
    Content,
    Reasoning,
    Call { id: String, name: String },
}

/// What becomes of the blocks with a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::http) enum BlockStep {
    Begins(BlockKind),
    /// Of the block that is open.
    Text(String),
    Ends,
}

/// Which block is open.
#[derive(Debug, Default)]
pub(in crate::http) struct BlockOrder {
    open: Open,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Open {
    #[default]
    Nothing,
    Content,
    Reasoning,
    Call(u32),
}

impl BlockOrder {
    /// Hands the steps that a part makes to `step`. A part without text makes none, unless it begins a call.
    pub(in crate::http) fn take<E>(
        &mut self,
        part: Part,
        step: &mut impl FnMut(BlockStep) -> Result<(), E>,
    ) -> Result<(), E> {
        let (open, begins, text) = match part {
            Part::Content(text) => (Open::Content, BlockKind::Content, text),
            Part::Reasoning(text) => (Open::Reasoning, BlockKind::Reasoning, text),
            Part::CallBegins { index, id, name } => {
                self.finish(step)?;
                self.open = Open::Call(index);
                return step(Begins(BlockKind::Call { id, name }));
            }
            // calls come one after the other: this is of the one that is open
            Part::CallArguments { index, text } => {
                debug_assert_eq!(self.open, Open::Call(index), "arguments of a call that is open");
                return if text.is_empty() { Ok(()) } else { step(Text(text)) };
            }
        };
        if text.is_empty() {
            return Ok(());
        }
        if self.open != open {
            self.finish(step)?;
            self.open = open;
            step(Begins(begins))?;
        }
        step(Text(text))
    }

    /// The answer ended.
    pub(in crate::http) fn finish<E>(
        &mut self,
        step: &mut impl FnMut(BlockStep) -> Result<(), E>,
    ) -> Result<(), E> {
        match std::mem::take(&mut self.open) {
            Open::Nothing => Ok(()),
            Open::Content | Open::Reasoning | Open::Call(_) => step(Ends),
        }
    }
}

/// A block with all its text.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::http) struct Block {
    pub(in crate::http) kind: BlockKind,
    pub(in crate::http) text: String,
    /// Of content, where log-probabilities were asked for.
    pub(in crate::http) tokens: Vec<ScoredToken>,
}

impl Block {
    /// Without text.
    pub(in crate::http) fn empty(kind: BlockKind) -> Self {
        Self { kind, text: String::new(), tokens: Vec::new() }
    }
}

/// What a token with its log-probability takes as text, and so each of its alternatives. A guess on the high side.
const SCORED_BYTES: usize = 160;

/// What these take at most, kept and as text.
pub(in crate::http) fn scored_bytes(tokens: &[ScoredToken]) -> usize {
    tokens.iter().map(|token| (1 + token.top.len()) * SCORED_BYTES).sum()
}

/// Blocks that are kept until their answer is whole, and what they are charged.
#[derive(Debug)]
pub(in crate::http) struct KeptBlocks {
    pub(in crate::http) blocks: Vec<Block>,
    pub(in crate::http) memory: MemoryShare,
    /// Tokens of the text of content that comes next.
    scored: Vec<ScoredToken>,
}

impl KeptBlocks {
    pub(in crate::http) fn new(memory: MemoryShare) -> Self {
        Self { blocks: Vec::new(), memory, scored: Vec::new() }
    }

    /// Keeps what a step adds.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(in crate::http) fn keep(&mut self, step: &BlockStep) -> Result<(), Refused> {
        match step {
            Begins(kind) => {
                self.memory.room_for_one(&mut self.blocks)?;
                if let BlockKind::Call { id, name } = kind {
                    self.memory.charge(id.len() + name.len() + 2 * ALLOCATION_BYTES)?;
                }
                self.blocks.push(Block::empty(kind.clone()));
            }
            Text(text) => {
                self.memory.charge(2 * text.len())?; // a string doubles
                if let Some(last) = self.blocks.last_mut() {
                    last.text.push_str(text);
                }
                self.keep_scored()?;
            }
            Ends => self.keep_scored()?,
        }
        Ok(())
    }

    /// Tokens of content that became certain. They are kept with its next text, or its end.
    pub(in crate::http) fn score(&mut self, tokens: Vec<ScoredToken>) {
        self.scored.extend(tokens);
    }

    fn keep_scored(&mut self) -> Result<(), Refused> {
        let content = self.blocks.last_mut().filter(|block| block.kind == BlockKind::Content);
        if let Some(block) = content.filter(|_| !self.scored.is_empty()) {
            self.memory.charge(scored_bytes(&self.scored))?;
            block.tokens.append(&mut self.scored);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::memory::MemoryPool;

    fn content(text: &str) -> Part {
        Part::Content(text.into())
    }

    fn call(index: u32) -> [Part; 3] {
        let arguments = |text: &str| Part::CallArguments { index, text: text.into() };
        let begins = Part::CallBegins { index, id: format!("c{index}"), name: "f".into() };
        [begins, arguments("{"), arguments("}")]
    }

    fn kept(parts: impl IntoIterator<Item = Part>) -> Vec<(BlockKind, String)> {
        let mut order = BlockOrder::default();
        let mut kept = KeptBlocks::new(MemoryPool::private(1 << 20).share());
        let mut open = 0;
        let mut step = |step: BlockStep| {
            open += match step {
                Begins(_) => 1,
                Ends => -1,
                Text(_) => 0,
            };
            assert!((0..=1).contains(&open), "blocks do not overlap");
            kept.keep(&step)
        };
        for part in parts {
            order.take(part, &mut step).unwrap();
        }
        order.finish(&mut step).unwrap();
        order.finish(&mut step).unwrap();
        assert_eq!(open, 0);
        kept.blocks.into_iter().map(|block| (block.kind, block.text)).collect()
    }

    #[test]
    fn parts_of_one_kind_are_one_block_and_calls_are_one_each() {
        let mut parts = vec![Part::Reasoning("a".into()), Part::Reasoning("b".into())];
        parts.extend([content("c"), content(""), content("d")]);
        parts.extend(call(0));
        parts.extend(call(1));
        parts.push(content("e"));
        let called = |id: &str| BlockKind::Call { id: id.into(), name: "f".into() };
        let want = [
            (BlockKind::Reasoning, "ab".to_owned()),
            (BlockKind::Content, "cd".to_owned()),
            (called("c0"), "{}".to_owned()),
            (called("c1"), "{}".to_owned()),
            (BlockKind::Content, "e".to_owned()),
        ];
        assert_eq!(kept(parts), want);
    }

    #[test]
    fn nothing_makes_no_block() {
        assert_eq!(kept([content("")]), []);
        assert_eq!(kept([]), []);
    }

    #[test]
    fn what_is_kept_is_charged() {
        let mut kept = KeptBlocks::new(MemoryPool::private(20_000).share());
        kept.keep(&Begins(BlockKind::Content)).unwrap();
        let mut bytes = 0;
        while kept.keep(&Text("x".repeat(100))).is_ok() {
            bytes += 100;
        }
        assert!(kept.memory.used() >= kept.blocks[0].text.capacity() && bytes > 9_000);
        assert_eq!(kept.blocks[0].text.len(), bytes, "what was refused was not kept");
    }
}
