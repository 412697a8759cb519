//! The tokens of a model, and grammars compiled for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use headrace_router::core::frame::{Grammar, GrammarKind, Reasoning, Word as _};
use headrace_router::request::grammar::{
    Compiled, Follower, GrammarTokens, KnownGrammar, KnownGrammars,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Compiled grammars that are kept, at 40 MB at most and some hundred KB as a rule. A guess.
const KNOWN_GRAMMARS: usize = 64;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct GrammarVocabulary {
    vocabulary: Arc<GrammarTokens>,
    known: KnownGrammars<Known>,
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
    fn of(vocabulary: GrammarTokens) -> Self {
        Self {
            vocabulary: Arc::new(vocabulary),
            known: KnownGrammars::new(KNOWN_GRAMMARS),
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
    fn new(py: Python<'_>, document: &[u8]) -> PyResult<Self> {
        let made = py.detach(|| GrammarTokens::of_document(document));
        Ok(Self::of(made.map_err(|error| PyValueError::new_err(error.to_string()))?))
    }

    #[staticmethod]
    fn of_tokens(py: Python<'_>, tokens: Vec<Vec<u8>>, ends: Vec<u32>) -> PyResult<Self> {
        let made = py.detach(|| GrammarTokens::new(&tokens, &ends));
        Ok(Self::of(made.map_err(|error| PyValueError::new_err(error.to_string()))?))
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
        let known = py.detach(|| self.known(kind, source))?;
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
    reasoning: Option<Arc<Reasoning>>,
}

#[pymethods]
impl AnswerRules {
    #[new]
    #[pyo3(signature = (grammar, reasoning=None))]
    fn new(
        grammar: Option<&CompiledGrammar>,
        reasoning: Option<(Vec<u32>, Vec<u32>, Option<u32>)>,
    ) -> Self {
        let reasoning = reasoning.map(|(begin, end, max_tokens)| {
            Arc::new(Reasoning { begin, end, max_tokens }) // bounded by the frame that it came in
        });
        Self { grammar: grammar.map(|grammar| Arc::clone(&grammar.compiled)), reasoning }
    }
}

impl AnswerRules {
    /// An answer that has no token yet, of a model with so many tokens; `None` where a marker has others.
    pub(super) fn follower(&self, tokens: usize) -> Option<Follower> {
        let follower = self.grammar.as_ref().map_or_else(Follower::free, |it| it.follower());
        let Some(reasoning) = &self.reasoning else { return Some(follower) };
        let mut markers = reasoning.begin.iter().chain(&reasoning.end);
        let known = markers.all(|token| (*token as usize) < tokens);
        known.then(|| follower.reasoning(Arc::clone(reasoning)))
    }
}
