//! The workers: their links, what they said of themselves, and their load.
