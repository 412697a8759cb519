//! Whether answers can follow a grammar: from what is known, or found out away from the threads that serve the sockets.

use std::sync::Arc;
use std::time::Instant;

use crate::error::RouteError;
use crate::http::Surface;
use crate::http::parse::grammar::Asked;
use crate::limits::shares::Holder;
use crate::process::background;

/// Checks what a request of `holder` asked for. Holders take turns: a flood of grammars holds up nobody else's for longer than
/// one check for each of those that wait.
///
/// # Errors
/// `BadRequest` whose `param` is the place of what is wrong; `Overloaded` if too many wait.
///
/// # Cancel safety
/// A dropped call does not stop a check that has begun; it keeps its turn until it is done.
pub(super) async fn check(
    surface: &Surface,
    holder: Holder,
    asked: Option<Asked>,
) -> Result<(), RouteError> {
    let Some(asked) = asked else { return Ok(()) };
    let metrics = &surface.app.metrics.grammars;
    // What is wrong is not kept: its error names the field of one request.
    if surface.grammars.get(&asked.grammar).is_some() {
        metrics.known.inc();
        return Ok(());
    }
    let turn = surface.turns.take(holder).await.inspect_err(|_| {
        metrics.turned_away.inc();
    })?;
    if surface.grammars.get(&asked.grammar).is_some() {
        metrics.known.inc(); // another request had it checked meanwhile
        return Ok(());
    }
    let (app, grammars) = (Arc::clone(&surface.app), Arc::clone(&surface.grammars));
    background::run("grammar", move || {
        let began = Instant::now();
        let checked = asked.check();
        app.metrics.grammars.check_seconds.observe(began.elapsed());
        match &checked {
            Ok(()) => grammars.put(asked.grammar, Ok(Arc::new(()))),
            Err(_) => {
                app.metrics.grammars.refused.inc();
            }
        }
        drop(turn);
        checked
    })
    .await?
}
