//! What templates may call: functions, filters, tests and methods. What is not here does not exist.

pub(crate) mod args;
pub(crate) mod checks;
pub(crate) mod filters;
pub(crate) mod functions;
pub(crate) mod lists;
pub(crate) mod methods;
pub(crate) mod sorting;
