//! `headrace._core`: what Python sees of the router. Each function converts, detaches, calls the router crate, converts
//! back; `pyworkers/headrace/_core.pyi` has the documentation, and stubtest compares the two.

mod bench;
mod errors;
mod etcd;
mod grammar;
mod hash;
mod index;
mod kernels;
mod memory;
mod ranks;
mod router;
mod sampling;
mod segments;
mod signals;
mod step;
mod wire;

/// As in the router's own binary. Only what Rust allocates here comes from it; Python, numpy and torch keep theirs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The module lists all that Python sees.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    const HASH_SCHEME: &str = headrace_router::core::blocks::HASH_SCHEME;
    #[pymodule_export]
    const OPT_LEVEL: &str = env!("HEADRACE_OPT_LEVEL");
    #[pymodule_export]
    use crate::bench::bench_main;
    #[pymodule_export]
    use crate::etcd::{Etcd, EtcdWatch};
    #[pymodule_export]
    use crate::grammar::{
        AnswerRules, CompiledGrammar, GrammarRows, GrammarVocabulary, argmax_of_few, mask_logits,
    };
    #[pymodule_export]
    use crate::hash::{auth_proof, derive_hash_key, hash_blocks};
    #[pymodule_export]
    use crate::index::BlockIndex;
    #[pymodule_export]
    use crate::kernels::{Experts, HeadMatrices, Program, Slots, Table, Value, Weight};
    #[pymodule_export]
    use crate::ranks::{SharedExchange, SharedParcels, order_of_sends, plan_sends};
    #[pymodule_export]
    use crate::router::{
        Router, check_key_line, check_router, read_config, router_flags, router_main,
    };
    #[pymodule_export]
    use crate::sampling::{edit_logits, highest_logits, race};
    #[pymodule_export]
    use crate::segments::{copy_segments, crc32};
    #[pymodule_export]
    use crate::signals::end_on_signals;
    #[pymodule_export]
    use crate::step::{
        CountColumns, InputColumns, SamplingColumns, cut_answers, hash_next_blocks, noise_keys,
    };
    #[pymodule_export]
    use crate::wire::outputs::{encode_outputs, encode_step};
    #[pymodule_export]
    use crate::wire::{decode_frame, encode_frame};
}
