//! What was typed, and what was checked.
