//! Graceful end: drain, then stop.
