//! headrace._core
