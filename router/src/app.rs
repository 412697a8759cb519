//! What all requests share.

use std::sync::Arc;

use crate::config::Config;
use crate::fleet::{Fleet, StartError};
use crate::metrics::Metrics;

/// The router without its HTTP server. Tests and `http::app` need no more.
#[derive(Debug)]
pub struct App {
    /// Checked at the start.
    pub config: Config,
    /// The workers.
    pub fleet: Fleet,
    /// Everything that is counted.
    pub metrics: Arc<Metrics>,
}

impl App {
    /// Binds the address of the workers and starts to listen there.
    ///
    /// # Errors
    /// The address cannot be bound, or the certificate cannot be used.
    pub async fn start(config: Config) -> Result<Arc<Self>, StartError> {
        let metrics = Arc::new(Metrics::default());
        let fleet = Fleet::start(&config, Arc::clone(&metrics)).await?;
        Ok(Arc::new(Self { config, fleet, metrics }))
    }

    /// The body of `/metrics`.
    #[must_use]
    pub fn render_metrics(&self) -> String {
        let mut text = self.metrics.render();
        self.fleet.render(&mut text);
        text.into_string()
    }
}
