//! `/workers/NAME/drain`: ask a worker to leave (POST), and see how that goes (GET, again and again until `phase` is `done`).

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use serde_json::Value;

use crate::app::App;
use crate::error::RouteError;
use crate::fleet::{DrainError, DrainOrder};
use crate::http::Surface;
use crate::http::generate;
use crate::http::parse::fields::{Fields, clip};
use crate::http::reply::reject::Reject;

/// What is asked for where the body says nothing else.
const BUDGET_MS: i64 = 30_000;
const HAND_OVER: i64 = 4_096;
/// An hour, after which an operator would rather stop the worker.
const LONGEST_BUDGET_MS: i64 = 3_600_000;
/// Blocks: more would make frames of megabytes.
const MOST_BLOCKS: i64 = 65_536;

/// Begins to drain a worker.
pub(super) async fn begin(
    State(surface): State<Surface>,
    Path(worker): Path<String>,
    request: Request,
) -> Result<(StatusCode, Json<Value>), Reject> {
    let generate::ReadBody { fields, memory: _memory, .. } =
        generate::read(&surface, request, None, Ok).await?;
    let order = order(fields)?;
    match surface.app.fleet.drain(&worker, order) {
        Ok(state) => Ok((StatusCode::ACCEPTED, Json(state))),
        Err(DrainError::Unknown) => Err(Reject::NoSuchWorker { worker: clip(&worker) }),
        Err(DrainError::Already) => Err(Reject::LeavesAlready { worker: clip(&worker) }),
    }
}

/// What a body asks for.
pub(super) fn order(mut fields: Fields) -> Result<DrainOrder, RouteError> {
    let budget_ms = fields.integer("budget_ms", 0..=LONGEST_BUDGET_MS)?.unwrap_or(BUDGET_MS);
    let migration = fields.integer("hand_over", 0..=MOST_BLOCKS)?.unwrap_or(HAND_OVER);
    fields.finish()?;
    Ok(DrainOrder {
        budget: Duration::from_millis(u64::try_from(budget_ms).expect("range was checked")),
        migration: u32::try_from(migration).expect("range was checked"),
    })
}

/// How the last drain of a worker stands.
pub(super) async fn state(
    State(app): State<Arc<App>>,
    Path(worker): Path<String>,
) -> Result<Json<Value>, Reject> {
    let state = app.fleet.drain_state(&worker);
    state.map(Json).ok_or_else(|| Reject::NoDrain { worker: clip(&worker) })
}
