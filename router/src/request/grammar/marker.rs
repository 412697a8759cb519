//! The texts around reasoning, found in tokens however a model cuts them: special tokens by their id, all others by their bytes.

use std::sync::Arc;

use super::vocabulary::GrammarTokens;

/// What markers are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    /// It has no text that another token could have.
    Token(u32),
    Byte(u8),
}

/// The tokens of a model as symbols; where it is not known what they write, each is one for itself.
#[derive(Debug, Clone)]
pub(super) struct MarkerSymbols(Option<Arc<GrammarTokens>>);

impl MarkerSymbols {
    pub(super) fn new(tokens: Option<Arc<GrammarTokens>>) -> Self {
        Self(tokens)
    }

    pub(super) fn of(&self, token: u32) -> impl ExactSizeIterator<Item = Symbol> + '_ {
        let bytes = self.0.as_ref().and_then(|tokens| tokens.text(token)).unwrap_or_default();
        let alone = bytes.is_empty();
        (0..bytes.len().max(1))
            .map(move |at| if alone { Symbol::Token(token) } else { Symbol::Byte(bytes[at]) })
    }

    /// Tokens that write the beginning of `rest`, or all of it, shortest first.
    pub(super) fn beginning(&self, rest: &[Symbol]) -> Vec<u32> {
        if let Some(Symbol::Token(token)) = rest.first() {
            return vec![*token];
        }
        let bytes = rest.iter().map_while(|symbol| match symbol {
            Symbol::Byte(byte) => Some(*byte),
            Symbol::Token(_) => None,
        });
        let bytes: Vec<u8> = bytes.collect();
        self.0.as_ref().map(|tokens| tokens.beginning(&bytes)).unwrap_or_default()
    }

    /// Tokens that write this byte before their end.
    fn holding(&self, byte: u8) -> Arc<[u32]> {
        self.0.as_ref().map(|tokens| tokens.holding(byte)).unwrap_or_default()
    }
}

/// One of these texts.
#[derive(Debug)]
pub(super) struct Marker {
    text: Vec<Symbol>,
    /// Tokens that may write its last byte, and more behind it.
    longer: Arc<[u32]>,
    /// Behind all but its last token only that one can come: it stands between special tokens, and is one itself.
    has_certain_end: bool,
}

impl Marker {
    pub(super) fn new(tokens: &[u32], symbols: &MarkerSymbols) -> Self {
        let text: Vec<Symbol> = tokens.iter().flat_map(|token| symbols.of(*token)).collect();
        let longer = match text.last() {
            Some(Symbol::Byte(byte)) => symbols.holding(*byte),
            Some(Symbol::Token(_)) | None => Arc::default(),
        };
        let special = |symbol: &Symbol| matches!(symbol, Symbol::Token(_));
        let has_certain_end =
            text.last().is_some_and(special) && !text.iter().all(special) && text.len() > 1;
        Self { text, longer, has_certain_end }
    }

    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn rest(&self, matched: usize) -> &[Symbol] {
        &self.text[matched..]
    }

    /// The token that writes the most of what is lacking.
    pub(super) fn next(&self, matched: usize, symbols: &MarkerSymbols) -> Option<u32> {
        symbols.beginning(self.rest(matched)).pop()
    }

    /// From each of its places there is a way to its end.
    pub(super) fn can_be_written(&self, symbols: &MarkerSymbols) -> bool {
        (0..self.len()).all(|at| self.next(at, symbols).is_some())
    }

    pub(super) fn is_certain(&self, matched: usize) -> bool {
        self.has_certain_end && matched + 1 == self.len()
    }

    /// How much of its beginning stands at the end, if so much did before this symbol.
    pub(super) fn after(&self, matched: usize, symbol: Symbol) -> usize {
        let text = &self.text;
        (1..=(matched + 1).min(text.len()))
            .rev()
            .find(|&len| {
                text[len - 1] == symbol && text[..len - 1] == text[matched + 1 - len..matched]
            })
            .unwrap_or(0)
    }

    /// This token ends it and says more, so that what is more could not be told from what was before.
    pub(super) fn is_passed_by(&self, token: u32, matched: usize, symbols: &MarkerSymbols) -> bool {
        let mut matched = matched;
        let text = symbols.of(token);
        let last = text.len() - 1;
        for (at, symbol) in text.enumerate() {
            matched = self.after(matched, symbol);
            if matched == self.len() {
                return at < last;
            }
        }
        false
    }

    /// All tokens of this kind.
    pub(super) fn passed_by<'a>(
        &'a self,
        matched: usize,
        symbols: &'a MarkerSymbols,
    ) -> impl Iterator<Item = u32> + 'a {
        let longer = self.longer.iter().copied();
        longer.filter(move |token| self.is_passed_by(*token, matched, symbols))
    }
}
