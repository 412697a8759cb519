//! Chained block hashes: which prompts share which blocks.
