//! Parts of the router measured alone, without a router.

pub(crate) mod decide;
pub(crate) mod index;
pub(crate) mod tokens;
