//! The OpenAI-compatible surface.

use std::sync::Arc;

use crate::app::App;

/// All routes.
pub fn app(state: Arc<App>) -> axum::Router {
    axum::Router::new().with_state(state)
}
