//! Other APIs for the same answers.

mod messages;
mod responses;
mod vectors;
