//! The placement policies, chosen by name.
