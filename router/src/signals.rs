//! What SIGTERM and SIGINT do.

use std::future::Future;

use crate::shutdown::Stopper;

/// Drains on the first SIGTERM or SIGINT, stops at once on the second. The signals are caught from now on; the future
/// acts on them.
///
/// # Errors
/// The signals cannot be caught.
///
/// # Panics
/// Outside of a tokio runtime.
pub fn stop_on_signals(
    stopper: Stopper,
) -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        next().await;
        stopper.drain();
        next().await;
        stopper.stop();
    })
}
