//! What a worker does with legs that two workers share: it passes between its engine, the exchange and the router.

use headrace_router::core::frame::{Failed, Freed, RequestId, TransferFailure};

use super::engine::{Engine, StepResult};
use super::exchange::{Exchange, Ills, News, Pulled};

/// One worker's engine and the exchange, at a moment.
#[derive(Debug)]
pub(crate) struct KvLegs<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) exchange: &'a mut Exchange,
    /// Number of the worker.
    pub(crate) worker: usize,
    pub(crate) now_ms: f64,
}

/// What the router is told.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Say {
    /// The prompt of this leg may be pulled.
    KvReady {
        request: RequestId,
        ticket: Vec<u8>,
        lease_ms: u32,
    },
    Freed(Freed),
    Failed(Failed),
    Transferred(Pulled),
}

impl KvLegs<'_> {
    /// After the beginning of each step, whether there was anything to do or not: prompts that were admitted may be
    /// pulled, and those that got their blocks are. `ills`: what befalls the next one of the former.
    pub(crate) fn began(&mut self, mut ills: impl FnMut() -> Ills) -> Vec<Say> {
        let offer = |export| {
            let ticket = self.exchange.offer(self.worker, &export, ills());
            Say::KvReady { request: export.request, ticket, lease_ms: export.lease_ms }
        };
        let said = self.engine.take_exports().into_iter().map(offer).collect();
        for pull in self.engine.take_pulls() {
            self.exchange.pull(self.worker, &pull, self.now_ms);
        }
        said
    }

    /// After a step.
    pub(crate) fn ended(&mut self, result: &StepResult) {
        for progress in &result.progress {
            self.exchange.computed(self.worker, progress, result.step.ms, self.now_ms);
        }
        for freed in &result.freed {
            self.exchange.withdraw(
                (self.worker, freed.request),
                TransferFailure::Lost,
                self.now_ms,
            );
        }
    }

    /// The router wants no more of a leg. `None` if it is not here.
    pub(crate) fn cancel(&mut self, request: RequestId) -> (Vec<Say>, Option<Freed>) {
        let place = (self.worker, request);
        self.exchange.withdraw(place, TransferFailure::Revoked, self.now_ms);
        let pulled = self.exchange.abandon(place, TransferFailure::Cancelled);
        (pulled.into_iter().map(Say::Transferred).collect(), self.engine.cancel(request))
    }

    /// The router lets an answer go on after so many tokens of it.
    pub(crate) fn go_on(&mut self, request: RequestId, generated: u32) -> Vec<Say> {
        let mut said = Vec::new();
        match self.engine.go_on(request, generated) {
            Ok(Some(patience_ms)) => {
                let until_ms = self.now_ms + f64::from(patience_ms);
                self.exchange.expect_until((self.worker, request), until_ms);
                return said;
            }
            Ok(None) => {}
            Err(failed) => said.push(Say::Failed(failed)),
        }
        said.extend(self.abandon(request, TransferFailure::Cancelled));
        said
    }

    /// Everything that is due by now.
    pub(crate) fn hear(&mut self) -> Vec<Say> {
        let mut said = Vec::new();
        for news in self.exchange.take(self.worker, self.now_ms) {
            match news {
                News::Pulled(pulled) => {
                    match pulled.error {
                        None => self.engine.pulled(pulled.request),
                        Some(_) => self.engine.pull_failed(pulled.request),
                    }
                    said.push(Say::Transferred(pulled));
                }
                News::Released(request) => {
                    said.extend(self.engine.cancel(request).map(Say::Freed));
                }
                News::LeaseEnds(request) => {
                    self.exchange.withdraw(
                        (self.worker, request),
                        TransferFailure::Expired,
                        self.now_ms,
                    );
                    said.extend(self.engine.cancel(request).map(Say::Freed));
                }
                News::TooLate(request) if self.engine.expects(request) => {
                    self.engine.alone(request);
                    said.extend(self.abandon(request, TransferFailure::Timeout));
                }
                News::TooLate(_) => {}
            }
        }
        said
    }

    fn abandon(&mut self, request: RequestId, why: TransferFailure) -> Option<Say> {
        self.exchange.abandon((self.worker, request), why).map(Say::Transferred)
    }
}

#[cfg(test)]
mod tests;
