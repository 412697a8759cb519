//! The standalone binary.
fn main() {}
