//! The tokens of a model, and grammars compiled for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use headrace_router::core::frame::{Grammar, GrammarKind, Reasoning, Word as _};
use headrace_router::request::grammar::{
    Compiled, Follower, GrammarTokens, KnownGrammar, KnownGrammars, ReasoningRules,
};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

/// Compiled grammars that are kept, at 40 MB at most and some hundred KB as a rule. A guess.
const KNOWN_GRAMMARS: usize = 64;

/// What all grammars of a worker and the answers that follow them may hold: 25 grammars of the largest kind. A guess.
const MEMORY_BYTES: u64 = 1 << 30;

/// Of `Reasoning`, in the order of its fields.
type ReasoningFields = (Vec<u32>, Vec<u32>, Option<u32>, u32, Vec<u32>);

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct GrammarVocabulary {
    vocabulary: Arc<GrammarTokens>,
    known: Arc<KnownGrammars<Known>>,
    refused: AtomicU64,
    compiled: AtomicU64,
    found: AtomicU64,
    compile_us: AtomicU64,
}

/// A grammar that is kept.
struct Known {
    compiled: Arc<Compiled>,
    /// A request has it.
    used: AtomicBool,
}

impl GrammarVocabulary {
    fn of(vocabulary: GrammarTokens, memory_bytes: u64) -> Self {
        let known = Arc::new(KnownGrammars::<Known>::new(KNOWN_GRAMMARS));
        let memory = vocabulary.memory();
        let (unused, held) = (Arc::downgrade(&known), Arc::downgrade(memory));
        memory.bound(memory_bytes, move || {
            if let (Some(known), Some(held)) = (unused.upgrade(), held.upgrade()) {
                let unused = |known: &Known| Arc::strong_count(&known.compiled) == 1;
                known.give_way(|| held.bytes() > memory_bytes / 2, unused);
            }
        });
        Self {
            vocabulary: Arc::new(vocabulary),
            known,
            refused: AtomicU64::new(0),
            compiled: AtomicU64::new(0),
            found: AtomicU64::new(0),
            compile_us: AtomicU64::new(0),
        }
    }

    fn known(&self, kind: &str, source: &str) -> PyResult<KnownGrammar<Known>> {
        let kind = GrammarKind::named(kind)
            .ok_or_else(|| PyValueError::new_err(format!("no kind of grammar {kind:?}")))?;
        let grammar = Grammar { kind, source: source.into() };
        if let Some(known) = self.known.get(&grammar) {
            return Ok(known);
        }
        if !self.vocabulary.memory().has_room() {
            let held = self.vocabulary.memory().bytes();
            return Err(PyMemoryError::new_err(format!(
                "the grammars in use hold {held} bytes, and no further one is compiled above three quarters of {}; try again when answers have ended",
                self.vocabulary.memory().most()
            )));
        }
        let began = Instant::now();
        let made = self.vocabulary.compile(&grammar).map(|compiled| {
            Arc::new(Known { compiled: Arc::new(compiled), used: AtomicBool::new(false) })
        });
        let us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.compile_us.fetch_add(us, Ordering::Relaxed);
        self.compiled.fetch_add(1, Ordering::Relaxed);
        self.known.put(grammar, made.clone());
        Ok(made)
    }
}

#[pymethods]
impl GrammarVocabulary {
    #[new]
    #[pyo3(signature = (document, *, memory_bytes=MEMORY_BYTES))]
    fn new(py: Python<'_>, document: &[u8], memory_bytes: u64) -> PyResult<Self> {
        let made = py.detach(|| GrammarTokens::of_document(document));
        let made = made.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self::of(made, memory_bytes))
    }

    #[staticmethod]
    #[pyo3(signature = (tokens, ends, *, memory_bytes=MEMORY_BYTES))]
    fn of_tokens(
        py: Python<'_>,
        tokens: Vec<Vec<u8>>,
        ends: Vec<u32>,
        memory_bytes: u64,
    ) -> PyResult<Self> {
        let made = py.detach(|| GrammarTokens::new(&tokens, &ends));
        let made = made.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self::of(made, memory_bytes))
    }

    /// Whether `compile` finds it compiled.
    fn knows(&self, kind: &str, source: &str) -> bool {
        let grammar = GrammarKind::named(kind)
            .map(|kind| Grammar { kind, source: source.into() })
            .and_then(|grammar| self.known.get(&grammar));
        grammar.is_some()
    }

    fn prepare(&self, py: Python<'_>, kind: &str, source: &str) -> PyResult<()> {
        // what is wrong is known now, too: whoever takes the request in meets it again
        py.detach(|| self.known(kind, source)).map(drop)
    }

    fn compile(&self, py: Python<'_>, kind: &str, source: &str) -> PyResult<CompiledGrammar> {
        let known = py.detach(|| self.known(kind, source)).inspect_err(|error| {
            if error.is_instance_of::<PyMemoryError>(py) {
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
        })?;
        let known = known.map_err(|error| PyValueError::new_err(error.to_string()))?;
        if known.used.swap(true, Ordering::Relaxed) {
            self.found.fetch_add(1, Ordering::Relaxed);
        }
        Ok(CompiledGrammar { compiled: Arc::clone(&known.compiled) })
    }

    #[getter]
    fn tokens(&self) -> usize {
        self.vocabulary.tokens()
    }

    #[getter]
    fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    #[getter]
    fn found(&self) -> u64 {
        self.found.load(Ordering::Relaxed)
    }

    /// Grammars that were not compiled because those in use hold too much.
    #[getter]
    fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// What grammars and the answers that follow them hold.
    #[getter]
    fn memory_bytes(&self) -> u64 {
        self.vocabulary.memory().bytes()
    }

    #[getter]
    fn compile_us(&self) -> u64 {
        self.compile_us.load(Ordering::Relaxed)
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CompiledGrammar {
    compiled: Arc<Compiled>,
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct AnswerRules {
    grammar: Option<Arc<Compiled>>,
    reasoning: Option<Reasons>,
}

/// The rules of reasoning, and the tokens of its markers.
struct Reasons {
    rules: Arc<ReasoningRules>,
    tokens: Vec<u32>,
}

#[pymethods]
impl AnswerRules {
    #[new]
    #[pyo3(signature = (grammar, reasoning=None, vocabulary=None))]
    fn new(
        grammar: Option<&CompiledGrammar>,
        reasoning: Option<ReasoningFields>,
        vocabulary: Option<&GrammarVocabulary>,
    ) -> PyResult<Self> {
        let reasons = |(begin, end, max_tokens, begun, ends_too)| {
            // bounded by the frame that it came in
            let reasoning = Reasoning { begin, end, max_tokens, begun, ends_too };
            let vocabulary = vocabulary.map(|it| Arc::clone(&it.vocabulary));
            let rules = ReasoningRules::new(&reasoning, vocabulary)
                .ok_or_else(|| PyValueError::new_err("no tokens write what ends it"))?;
            let Reasoning { begin, end, ends_too, .. } = reasoning;
            PyResult::Ok(Reasons {
                rules: Arc::new(rules),
                tokens: [begin, end, ends_too].concat(),
            })
        };
        let reasoning = reasoning.map(reasons).transpose()?;
        Ok(Self { grammar: grammar.map(|grammar| Arc::clone(&grammar.compiled)), reasoning })
    }
}

impl AnswerRules {
    /// An answer that has no token yet, of a model with so many tokens; `None` where a marker has others.
    pub(super) fn follower(&self, tokens: usize) -> Option<Follower> {
        let follower = self.grammar.as_ref().map_or_else(Follower::free, |it| it.follower());
        let Some(reasoning) = &self.reasoning else { return Some(follower) };
        let known = reasoning.tokens.iter().all(|token| (*token as usize) < tokens);
        known.then(|| follower.reasoning(Arc::clone(&reasoning.rules)))
    }
}
