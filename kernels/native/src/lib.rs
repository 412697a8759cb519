//! CPU kernels of the engine.
//!
//! The one rule here: **every output element has one fixed order of arithmetic**, whatever the number of
//! rows, how they are cut into steps, the vector width or the machine. So a row's logits are bitwise the
//! same alone, among others, in one prefill, in chunks, after a cached prefix, or decoded.
//!
//! How: lanes are always *outputs* (columns, tokens), so a wider vector only computes more of them at
//! once, and each sums its products one after the other with fused multiply-adds, which round the same way
//! everywhere. With int8 weights sums are of integers, which are exact in any order. The few sums across
//! lanes use a fixed tree over sixteen of them. `exp`, `sin` and `cos` are our own polynomials, because
//! those of the system differ between machines.
//!
//! Reading order: [`simd`] (sixteen lanes on any machine), [`tile`] (the inner loop), [`weight`], [`product`] and
//! [`linear`], [`product::integers`] (the same with int8 weights), [`rows`], [`attention`] and [`mla`], [`moe::routing`] and [`moe`], then
//! [`program`], which records the [`op`]s of a whole model, and [`run`], which runs it for a [`step`]. [`sampling`] makes
//! tokens of what comes out.

pub mod attention;
pub mod linear;
pub mod math;
pub mod mla;
pub mod moe;
pub mod op;
pub mod product;
pub mod program;
pub mod rows;
pub mod run;
pub mod sampling;
pub mod simd;
pub mod step;
pub mod tile;
pub mod weight;
