//! The legs of requests: what is sent to workers and what comes back, as the router's `fleet::link::legs` does it.

use headrace_router::core::candidate::WorkerId;
use headrace_router::core::dispatch::Dispatch;
use headrace_router::core::frame::{Finish, Output as StepOutput, RequestId};
use headrace_router::core::scheduler::{Given, LegOutput, Placement, PrefillLeg};

use super::World;
use crate::mock::engine::{Leg, Scores};
use crate::mock::exchange::Pulled;
use crate::mock::kv_legs::{KvLegs, Say};
use crate::sim::arrival::State;
use crate::sim::events::Event;

/// What a worker has of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimLeg {
    request: usize,
    /// Number of the worker.
    place: usize,
    part: Part,
    /// Tokens of the answer when it began here, and those that came from here.
    before: u32,
    generated: u32,
    /// Another prompt came to the same worker before its own was computed.
    disturbed: bool,
}

impl SimLeg {
    pub(super) fn request(&self) -> usize {
        self.request
    }
}

#[derive(Debug, Clone, Copy)]
enum Part {
    Whole,
    /// Prompt and first token, until the latter comes; then only the blocks are left of it.
    Prefill {
        decode: RequestId,
        handed_off: bool,
    },
    /// Everything after the prompt, on another worker.
    Decode {
        prefill: RequestId,
    },
}

impl World {
    /// The legs of a request reach their workers.
    pub(super) fn deliver(&mut self, request: usize, placement: &Placement) {
        self.log(placement);
        let (decode, place) = (placement.request, self.place_of(placement.worker));
        let now_ms = self.now_ms;
        let arrival = &mut self.arrivals[request];
        arrival.state = State::Placed;
        let before = arrival.completion_tokens();
        let whole = Leg {
            request: decode,
            keys: arrival.keys_now(self.block_tokens),
            prompt_tokens: arrival.prompt_tokens + before,
            max_tokens: arrival.limit() - before,
            ends_after: Some(arrival.answer_tokens - before),
            seed: request as u64,
            resumed: before,
            kv_transfer: None,
            arrives: None,
            scripted: None,
            scores: Scores::default(),
            pooled: None,
        };
        let leg =
            SimLeg { request, place, part: Part::Whole, before, generated: 0, disturbed: false };
        let Some(PrefillLeg { request: prefill, worker }) = placement.prefill else {
            self.send(leg, whole);
            return;
        };
        self.split.requests += 1;
        let arrives = Some(self.transfer_timeout_ms);
        let of_decode = SimLeg { part: Part::Decode { prefill }, ..leg };
        if !self.send(of_decode, Leg { arrives, ..whole.clone() }) {
            self.router_for(request).end(prefill, LegOutput::default(), now_ms);
            return;
        }
        let place = self.place_of(worker);
        let part = Part::Prefill { decode, handed_off: false };
        let kv_transfer = Some(self.kv_lease_ms);
        let leg = SimLeg { place, part, ..leg };
        self.send(leg, Leg { request: prefill, kv_transfer, ..whole });
    }

    fn place_of(&self, id: WorkerId) -> usize {
        let mut workers = self.workers.iter();
        let place = workers.position(|worker| worker.link.as_ref().is_some_and(|l| l.id == id));
        place.expect("a worker without a link gets nothing")
    }

    /// False if the worker does not take it.
    fn send(&mut self, leg: SimLeg, what: Leg) -> bool {
        let (name, place) = (what.request, leg.place);
        if !matches!(leg.part, Part::Decode { .. }) {
            let there = self.legs.values_mut().filter(|other| other.place == place);
            there.for_each(|other| other.disturbed = true);
        }
        match self.workers[place].engine.submit(what) {
            Ok(()) => {
                self.legs.insert(name, leg);
                self.begin_step(place);
                self.tell_others(place, self.router_of(leg.request));
                true
            }
            Err(failed) => {
                let now_ms = self.now_ms;
                self.router_for(leg.request).end(name, LegOutput::default(), now_ms);
                match leg.part {
                    Part::Prefill { decode, .. } if failed.kind.is_retryable() => {
                        self.alone(decode);
                    }
                    Part::Prefill { decode, .. } => {
                        self.cancel(decode);
                        self.end(leg.request, |arrival| arrival.fail("400", failed.message));
                    }
                    Part::Whole | Part::Decode { .. } if failed.kind.is_retryable() => {
                        let id = self.workers[place].link.as_ref().map(|link| link.id);
                        let id = id.expect("it was placed there");
                        self.try_again(leg.request, id, &failed.message);
                    }
                    Part::Whole | Part::Decode { .. } => {
                        self.end(leg.request, |arrival| arrival.fail("400", failed.message));
                    }
                }
                false
            }
        }
    }

    /// What these outputs give to requests that had begun before, by router.
    pub(super) fn given(&self, outputs: &[StepOutput]) -> Vec<Given> {
        let mut given = vec![Given::default(); self.routers.len()];
        for output in outputs.iter().filter(|output| !output.ids.is_empty()) {
            if let Some(leg) = self.legs.get(&output.request)
                && leg.generated > 0
            {
                given[self.router_of(leg.request)].add(output.ids.len());
            }
        }
        given
    }

    /// A worker that takes a request from one router tells all others at once.
    fn tell_others(&mut self, place: usize, own: usize) {
        let heartbeat = self.workers[place].engine.heartbeat();
        for router in (0..self.routers.len()).filter(|router| *router != own) {
            self.report(place, router, &heartbeat, Given::default());
        }
    }

    fn router_for(&mut self, request: usize) -> &mut Dispatch<usize> {
        let router = self.router_of(request);
        &mut self.routers[router]
    }

    /// Tokens come from a worker.
    pub(super) fn take_in(&mut self, place: usize, output: &StepOutput) {
        let (name, now_ms) = (output.request, self.now_ms);
        let Some(leg) = self.legs.get_mut(&name) else { return };
        let tokens = u32::try_from(output.ids.len()).unwrap_or(u32::MAX);
        leg.generated += tokens;
        let leg = *leg;
        let router = self.router_of(leg.request);
        let worker = &self.workers[place].name;
        self.arrivals[leg.request].tokens(tokens, output.cached_tokens, worker, now_ms);
        if let Some(cached) = output.cached_tokens
            && let Some(begun) = self.routers[router].scheduler.begun(name, cached, now_ms)
        {
            if !matches!(leg.part, Part::Decode { .. }) {
                self.predictions.note(&begun, leg.disturbed);
            }
            self.workers[place].disbelieve(router, begun.withdrawn, now_ms);
        }
        let complete = matches!(output.finish, Some(Finish::Stop | Finish::Length));
        if output.finish.is_some() {
            self.leg_ends(name, complete);
            self.end(leg.request, |arrival| arrival.state = State::Done);
        }
        match leg.part {
            Part::Whole | Part::Decode { .. } => {}
            Part::Prefill { decode, .. } if output.finish.is_some() => self.cancel(decode),
            Part::Prefill { decode, .. } => {
                let part = Part::Prefill { decode, handed_off: true };
                self.legs.insert(name, SimLeg { part, ..leg });
                self.go_on(decode, 1);
            }
        }
    }

    /// The workers of a request have to do with each other.
    pub(super) fn said(&mut self, place: usize, said: Vec<Say>) {
        for say in said {
            match say {
                Say::KvReady { request, ticket, .. } => {
                    let leg = self.legs.get(&request).map(|leg| leg.part);
                    if let Some(Part::Prefill { decode, .. }) = leg
                        && let Some(leg) = self.legs.get(&decode)
                    {
                        let place = leg.place;
                        self.workers[place].engine.ticket(decode, ticket);
                        self.begin_step(place);
                    }
                }
                Say::Freed(freed) => {
                    self.leg_ends(freed.request, false);
                    self.begin_step(place);
                }
                Say::Failed(failed) => unreachable!("the router keeps count: {failed:?}"),
                Say::Transferred(pulled) => self.transferred(place, &pulled),
            }
        }
        self.ring();
    }

    /// What others did is due on a worker.
    pub(super) fn hear(&mut self, place: usize) {
        self.workers[place].rings_ms = f64::INFINITY;
        if self.workers[place].frozen_ms.is_some() {
            return; // it hears when it wakes
        }
        #[expect(
            clippy::redundant_closure_for_method_calls,
            reason = "the method fits one lifetime only"
        )]
        let said = self.kv_legs(place, |kv_legs| kv_legs.hear());
        self.said(place, said);
        self.ring_for(place);
        self.begin_step(place);
        self.dispatch_waiting();
    }

    /// Sees to it that workers are told in time what others did.
    pub(super) fn ring(&mut self) {
        for place in self.exchange.take_told() {
            self.ring_for(place);
        }
    }

    fn ring_for(&mut self, place: usize) {
        let Some(at_ms) = self.exchange.next_ms(place) else { return };
        let at_ms = at_ms.max(self.now_ms);
        let rings_ms = &mut self.workers[place].rings_ms;
        if at_ms < *rings_ms {
            *rings_ms = at_ms;
            self.events.at(at_ms, Event::News(place));
        }
    }

    pub(super) fn kv_legs<T>(&mut self, place: usize, act: impl FnOnce(&mut KvLegs<'_>) -> T) -> T {
        let engine = &mut self.workers[place].engine;
        let (exchange, now_ms) = (&mut self.exchange, self.now_ms);
        let done = act(&mut KvLegs { engine, exchange, worker: place, now_ms });
        self.ring();
        done
    }

    fn transferred(&mut self, place: usize, pulled: &Pulled) {
        let Some(link) = &self.workers[place].link else { return };
        let from = pulled.from.map(|from| &*self.workers[from].name).unwrap_or_default();
        let Some(leg) = self.legs.get(&pulled.request) else { return };
        let router = self.router_of(leg.request);
        let scheduler = &mut self.routers[router].scheduler;
        match pulled.error {
            None => {
                self.split.pulls += 1;
                self.split.bytes += pulled.bytes;
                scheduler.transferred(link.id, from, pulled.bytes, pulled.ms, self.now_ms);
            }
            Some(why) if why.blames_source() => {
                self.split.failed += 1;
                scheduler.transfer_failed(link.id, from, self.now_ms);
            }
            Some(_) => {}
        }
    }

    /// The decode leg goes on after so many tokens; with none, it does all by itself.
    fn go_on(&mut self, decode: RequestId, generated: u32) {
        let Some(leg) = self.legs.get_mut(&decode) else { return };
        leg.before += generated;
        let place = leg.place;
        let said = self.kv_legs(place, |kv_legs| kv_legs.go_on(decode, generated));
        self.said(place, said);
        self.begin_step(place);
    }

    /// A decode leg has lost its prefill worker before the first token.
    fn alone(&mut self, decode: RequestId) {
        self.split.alone += 1;
        let now_ms = self.now_ms;
        if let Some(request) = self.legs.get(&decode).map(|leg| leg.request) {
            self.router_for(request).scheduler.alone(decode, now_ms);
        }
        self.go_on(decode, 0);
    }

    /// A leg is of no use any more. Its worker hears of it at once, even a frozen one: that computes nothing anyway.
    fn cancel(&mut self, name: RequestId) {
        let Some(leg) = self.legs.get(&name) else { return };
        let place = leg.place;
        let (said, _) = self.kv_legs(place, |kv_legs| kv_legs.cancel(name));
        self.said(place, said);
        self.leg_ends(name, false);
        self.begin_step(place);
    }

    fn leg_ends(&mut self, name: RequestId, complete: bool) {
        if let Some(leg) = self.legs.remove(&name) {
            let output = LegOutput { tokens: leg.before + leg.generated, complete };
            let now_ms = self.now_ms;
            self.router_for(leg.request).end(name, output, now_ms);
        }
    }

    /// All legs on a worker go on elsewhere; `told`: it can be told so.
    pub(super) fn give_up_legs(&mut self, place: usize, id: WorkerId, why: &str, told: bool) {
        let here = |(_, leg): &(&RequestId, &SimLeg)| leg.place == place;
        let names: Vec<_> = self.legs.iter().filter(here).map(|(name, _)| *name).collect();
        for name in names {
            let Some(leg) = self.legs.get(&name).copied() else { continue };
            if told {
                self.cancel(name);
            } else {
                self.legs.remove(&name);
            }
            match leg.part {
                Part::Prefill { handed_off: true, .. } => {}
                Part::Prefill { decode, .. } => {
                    self.alone(decode);
                }
                Part::Decode { prefill } => {
                    self.cancel(prefill);
                    self.try_again(leg.request, id, why);
                }
                Part::Whole => self.try_again(leg.request, id, why),
            }
        }
    }
}
