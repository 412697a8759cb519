//! The tokens of a model, and grammars compiled for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use headrace_router::core::frame::{Grammar, GrammarKind, Word as _};
use headrace_router::request::grammar::{Compiled, GrammarTokens, KnownGrammars};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Compiled grammars that are kept, at 40 MB at most and some hundred KB as a rule. A guess.
const KNOWN_GRAMMARS: usize = 64;

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct GrammarVocabulary {
    pub(super) vocabulary: Arc<GrammarTokens>,
    known: KnownGrammars<Compiled>,
    compiled: AtomicU64,
    found: AtomicU64,
    compile_us: AtomicU64,
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

    fn compile(&self, py: Python<'_>, kind: &str, source: &str) -> PyResult<CompiledGrammar> {
        let kind = GrammarKind::named(kind)
            .ok_or_else(|| PyValueError::new_err(format!("no kind of grammar {kind:?}")))?;
        let grammar = Grammar { kind, source: source.into() };
        let known = py.detach(|| {
            if let Some(known) = self.known.get(&grammar) {
                self.found.fetch_add(1, Ordering::Relaxed);
                return known;
            }
            let began = Instant::now();
            let made = self.vocabulary.compile(&grammar).map(Arc::new);
            let us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.compile_us.fetch_add(us, Ordering::Relaxed);
            self.compiled.fetch_add(1, Ordering::Relaxed);
            self.known.put(grammar, made.clone());
            made
        });
        let compiled = known.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(CompiledGrammar { compiled })
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
    fn compile_ms(&self) -> f64 {
        self.compile_us.load(Ordering::Relaxed) as f64 / 1e3
    }
}

#[pyclass(frozen, module = "headrace._core")]
pub(crate) struct CompiledGrammar {
    pub(super) compiled: Arc<Compiled>,
}
