//! The models that a caller may use: those that its key names, or all. A model that it may not use does not exist for it, as
//! in OpenAI's API: a refusal of its own would tell what else is served.

use std::sync::Arc;

use axum::extract::Request;

use super::{Caller, Standing};
use crate::app::App;
use crate::error::RouteError;
use crate::fleet::{ModelInfo, ServedModel};
use crate::http::parse::fields::clip;
use crate::limits::key_ring::ClientKey;

/// See the head of this file.
#[derive(Debug, Clone, Default)]
pub(in crate::http) struct AllowedModels(Option<Arc<ClientKey>>);

impl AllowedModels {
    /// Those of who sent `request`.
    pub(in crate::http) fn of(request: &Request) -> Self {
        let caller = request.extensions().get::<Caller>();
        Self(caller.and_then(|caller| match &caller.key {
            Some(Standing::Client(key)) => {
                Some(Arc::clone(key)).filter(|key| key.terms().models.is_some())
            }
            _ => None,
        }))
    }

    /// A model that can be asked for.
    ///
    /// # Errors
    /// `UnknownModel`, also of a model that there is and this caller may not use; `NoWorker`.
    pub(in crate::http) fn find(
        &self,
        app: &App,
        name: &str,
    ) -> Result<Arc<ServedModel>, RouteError> {
        let Some(key) = &self.0 else { return app.fleet.find(name) };
        let models = app.fleet.models();
        let named = models.iter().find(|model| model.name == name);
        let named =
            named.or_else(|| models.iter().find(|model| names(model).any(|own| own == name)));
        let allowed = match named {
            Some(model) => key.terms().allow(names(model)),
            None => key.terms().allow(std::iter::once(name)),
        };
        if !allowed {
            return Err(self.unknown(app, name));
        }
        app.fleet.find(name).map_err(|error| {
            if matches!(error, RouteError::UnknownModel { .. }) {
                return self.unknown(app, name);
            }
            error
        })
    }

    /// All that can be asked for.
    pub(in crate::http) fn list(&self, app: &App) -> Vec<ModelInfo> {
        let mut models = app.fleet.models();
        if let Some(key) = &self.0 {
            models.retain(|model| key.terms().allow(names(model)));
        }
        models
    }

    /// What is said of a model that does not exist for this caller.
    pub(in crate::http) fn unknown(&self, app: &App, name: &str) -> RouteError {
        let models = self.list(app);
        let served: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        let served = if served.is_empty() { "none yet".to_owned() } else { served.join(", ") };
        RouteError::UnknownModel { model: clip(name), served }
    }
}

fn names(model: &ModelInfo) -> impl Iterator<Item = &str> {
    std::iter::once(&model.name).chain(&model.aliases).map(String::as_str)
}
