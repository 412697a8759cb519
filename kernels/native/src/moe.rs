//! A layer of experts: each row goes through the few that it chooses, and their outputs are added.
//!
//! Three stages: the [`router`] chooses, the [`slots`] of a rank compute, and the results are combined. An element is
//! `((residual + shared + y_a) + y_b) + ...` over the row's experts in ascending order. Where all experts are here,
//! results are added as they are made; otherwise rows and results move between ranks, by the program itself ([`apart`]) or
//! by an [`exchange`] that it calls, and they are added in the same order, so to the same bits.

mod apart;
pub mod exchange;
pub mod parcels;
pub mod router;
pub mod routing;
pub mod sends;
pub mod slots;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use self::exchange::{Combine, Dispatch, Exchange, Received, Returned, Routed, combine};
use self::router::{Chosen, Router};
use self::routing::RoutingError;
use self::slots::{Asked, Results, Sink, Slots};
use crate::linear::Linear;
use crate::product;
use crate::rows;
use crate::simd::Level;
use crate::step::{StepError, below, length};
use crate::weight::{Elements, Weight};

/// The expert that all rows go through: `down(silu(gate) * up)`.
#[derive(Debug)]
pub struct SharedExpert {
    /// `[2 * width, hidden]`.
    pub gate_up: Arc<Weight>,
    /// `[hidden, width]`.
    pub down: Arc<Weight>,
}

/// The router and the experts of one layer, as far as this rank holds them.
#[derive(Debug)]
pub struct Experts {
    router: Router,
    /// Locked for the time of a layer: a slot is never overwritten while it computes.
    slots: RwLock<Slots>,
    shared: Option<SharedExpert>,
    dispatch: Option<Dispatch>,
}

/// Why a layer cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ExpertsError {
    /// Rows cannot be routed so.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// A tensor or a list of them has the wrong size.
    #[error("experts: {what} has {got} elements, expected {expected}")]
    Size {
        /// Name of the tensor or list.
        what: &'static str,
        /// Elements that it has.
        got: usize,
        /// What the routing and the first expert say.
        expected: usize,
    },
    /// There is no such slot.
    #[error("slot {slot} of a rank that has {slots}")]
    Slot {
        /// The slot as it was given.
        slot: usize,
        /// How many there are.
        slots: usize,
    },
}

fn check_size(what: &'static str, got: usize, expected: usize) -> Result<(), ExpertsError> {
    if got == expected { Ok(()) } else { Err(ExpertsError::Size { what, got, expected }) }
}

impl Experts {
    /// A layer. Without a dispatch the slots are the experts, in their order.
    /// # Errors
    /// If parts do not fit together.
    pub fn new(
        router: Router,
        slots: Slots,
        shared: Option<SharedExpert>,
        dispatch: Option<Dispatch>,
    ) -> Result<Self, ExpertsError> {
        let hidden = router.hidden();
        check_size("an expert's row", slots.hidden(), hidden)?;
        if dispatch.is_none() {
            check_size("list of experts", slots.count(), router.routing().experts)?;
        }
        if let Some(SharedExpert { gate_up, down }) = &shared {
            check_size("row of the shared gate_up", gate_up.k(), hidden)?;
            check_size("row of the shared expert", down.n(), hidden)?;
            check_size("shared gate_up", gate_up.n(), 2 * down.k())?;
        }
        Ok(Self { router, slots: RwLock::new(slots), shared, dispatch })
    }

    /// Width of the rows.
    pub fn hidden(&self) -> usize {
        self.router.hidden()
    }

    /// Width of the rows, and of what an expert has in between.
    pub fn expert_size(&self) -> (usize, usize) {
        let slots = self.slots();
        (slots.hidden(), slots.width())
    }

    /// Bytes of the router and of the experts that are here.
    pub fn bytes(&self) -> usize {
        let shared = self.shared.as_ref();
        let shared = shared.map_or(0, |shared| shared.gate_up.bytes() + shared.down.bytes());
        self.router.bytes() + self.slots().bytes() + shared
    }

    /// Whether other ranks wait for this one in every step, also in one without rows.
    pub fn is_apart(&self) -> bool {
        self.dispatch.is_some()
    }

    /// Rows that chose each expert since the model was loaded.
    pub fn counts(&self) -> Vec<u64> {
        self.router.counts()
    }

    /// Puts another expert, `[2 * width, hidden]` and `[hidden, width]`, into a slot, in the same place in memory. Waits
    /// while this layer computes; its next step uses the new one.
    /// # Errors
    /// If there is no such slot, or the expert has another shape. Nothing is changed then.
    pub fn overwrite(
        &self,
        slot: usize,
        gate_up: Elements<'_>,
        down: Elements<'_>,
    ) -> Result<(), ExpertsError> {
        let mut packed = self.slots().one_alike();
        packed.push(gate_up, down)?;
        self.slots.write().unwrap_or_else(PoisonError::into_inner).put(slot, &packed)
    }

    /// Bytes of the image of one slot.
    pub fn image_len(&self) -> usize {
        self.slots().image_len()
    }

    /// The expert in a slot, packed as it is.
    /// # Errors
    /// If there is no such slot.
    pub fn read_image(&self, slot: usize) -> Result<Vec<u8>, ExpertsError> {
        self.slots().read_image(slot)
    }

    /// Puts the expert of an image into a slot, like [`Self::overwrite`].
    /// # Errors
    /// If there is no such slot, or the image is of another shape or dtype. Nothing is changed then.
    pub fn write_image(&self, slot: usize, image: &[u8]) -> Result<(), ExpertsError> {
        self.slots.write().unwrap_or_else(PoisonError::into_inner).write_image(slot, image)
    }

    fn slots(&self) -> RwLockReadGuard<'_, Slots> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub struct Scratch {
    router: router::Scratch,
    chosen: Chosen,
    /// What the shared expert has in between: `[gate | up]`, then their product.
    shared: (Vec<f32>, Vec<f32>),
    slots: slots::Scratch,
    received: Received,
    results: Results,
    sums: Vec<f32>,
    returned: Returned,
    apart: apart::Scratch,
}

/// One layer over some rows.
#[derive(Debug)]
pub struct Moe<'a> {
    /// `[rows, hidden]`.
    pub x: &'a [f32],
    /// Router and experts of the layer.
    pub experts: &'a Experts,
    /// `[rows, hidden]`, to which the experts are added.
    pub residual: &'a [f32],
    /// `[rows, hidden]`.
    pub y: &'a mut [f32],
}

impl Moe<'_> {
    /// Computes `y`.
    /// # Errors
    /// If the exchange fails, or gives what does not fit.
    /// # Panics
    /// If lengths do not fit.
    pub fn compute(
        mut self,
        level: Level,
        linear: &mut product::Scratch,
        scratch: &mut Scratch,
    ) -> Result<(), StepError> {
        let Experts { router, dispatch, .. } = self.experts;
        let Scratch { router: routing, chosen, .. } = scratch;
        router.route(level, self.x, linear, routing, chosen);
        match dispatch {
            None => {}
            Some(Dispatch::Calls(exchange)) => {
                return self.by_calls(&**exchange, level, linear, scratch);
            }
            Some(Dispatch::Parcels(parcels)) => {
                return self.by_parcels(&**parcels, level, linear, scratch);
            }
        }
        self.shared(level, linear, &mut scratch.shared);
        let Scratch { chosen: Chosen { ids, weights }, slots, .. } = scratch;
        let asked = Asked { x: self.x, slots: ids, weights, top_k: router.routing().top_k };
        self.experts.slots().compute(level, asked, linear, slots, Sink::Sums(self.y));
        Ok(())
    }

    /// The same with experts on several ranks, where somebody else exchanges rows and results.
    fn by_calls(
        &mut self,
        exchange: &dyn Exchange,
        level: Level,
        linear: &mut product::Scratch,
        scratch: &mut Scratch,
    ) -> Result<(), StepError> {
        let (hidden, top_k) = (self.experts.hidden(), self.experts.router.routing().top_k);
        let routed = Routed { x: self.x, chosen: &scratch.chosen, hidden, top_k };
        exchange.send(routed).map_err(StepError::Exchange)?;
        self.shared(level, linear, &mut scratch.shared);
        let Scratch { slots: sorted, received, results, sums, returned, .. } = scratch;
        exchange.receive(received).map_err(StepError::Exchange)?;
        let Received { x, slots, weights } = received;
        {
            let here = self.experts.slots();
            length("received slots", slots.len(), x.len() / hidden * top_k)?;
            length("received weights", weights.len(), slots.len())?;
            length("received rows", x.len(), slots.len() / top_k * hidden)?;
            below("received slots", named(slots), here.count())?;
            let asked = Asked { x, slots, weights, top_k };
            here.compute(level, asked, linear, sorted, Sink::Apart(results));
        }
        if exchange.combine() == Combine::Partial {
            sums.clear();
            sums.resize(x.len(), 0.0);
            combine(&results.y, &results.places, hidden, sums);
            std::mem::swap(&mut results.y, sums);
            results.places.clear();
            results.places.extend(0..(x.len() / hidden) as i32);
            results.answers = 1;
        }
        exchange.collect(results, returned).map_err(StepError::Exchange)?;
        let Returned { y, places } = returned;
        let rows = (self.y.len() / hidden).max(1);
        length("returned rows", y.len(), y.len() / hidden * hidden)?;
        length("returned places", places.len(), places.len() / rows * rows)?;
        below("returned places", named(places), y.len() / hidden)?;
        combine(y, places, hidden, self.y);
        Ok(())
    }

    /// Sets `y` to the residual and what the shared expert makes of `x`.
    fn shared(
        &mut self,
        level: Level,
        linear: &mut product::Scratch,
        (both, middle): &mut (Vec<f32>, Vec<f32>),
    ) {
        let Some(SharedExpert { gate_up, down }) = &self.experts.shared else {
            self.y.copy_from_slice(self.residual);
            return;
        };
        let (rows, width) = (self.x.len() / self.experts.hidden(), down.k());
        let (both, middle) = (reserve(both, rows * 2 * width), reserve(middle, rows * width));
        let job = Linear { x: self.x, weight: gate_up, residual: None, y: &mut *both };
        job.compute(level, linear);
        rows::silu_mul(level, both, width, middle);
        let residual = Some(self.residual);
        Linear { x: middle, weight: down, residual, y: self.y }.compute(level, linear);
    }
}

/// Entries that name something: `-1` does not.
fn named(entries: &[i32]) -> impl Iterator<Item = i64> {
    entries.iter().filter(|entry| **entry != -1).map(|entry| i64::from(*entry))
}

/// `len` floats of a buffer that only grows.
fn reserve(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
