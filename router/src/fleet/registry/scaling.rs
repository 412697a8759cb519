//! How many workers each model needs, for autoscalers: `/scale`, and the same as metrics.

use std::fmt;

use prometheus_client::encoding::EncodeLabelSet;
use serde_json::{Value, json};

use super::Registry;
use crate::config::RoutingConfig;
use crate::core::frame::{Role, Word as _};
use crate::core::scheduler::{ModelDemand, Needs, Targets};
use crate::fleet::pool::PoolSnapshot;
use crate::metrics::Scrape;

/// The workers of one role of a model.
struct ScaledRole<'a> {
    model: &'a str,
    role: Role,
    workers: u32,
    /// Ranks that start and end together; 1 where workers stand alone.
    group: u32,
    needs: Option<Needs>,
}

impl<'a> ScaledRole<'a> {
    fn all(pool: &'a PoolSnapshot, targets: Targets) -> impl Iterator<Item = Self> {
        pool.roles.iter().map(move |fleet| Self {
            model: &pool.model,
            role: fleet.role,
            workers: fleet.workers,
            group: pool.group_size(fleet.role),
            needs: fleet.needs(&pool.asked, targets),
        })
    }

    /// Whole groups.
    fn needed(&self) -> Option<u32> {
        Some(self.needs.as_ref()?.workers.next_multiple_of(self.group))
    }

    fn labels(&self) -> impl EncodeLabelSet + use<'a> {
        [("model", self.model), ("role", self.role.as_str())]
    }

    fn as_json(&self) -> Value {
        let needed = self.needed();
        let out_of_reach = self.needs.iter().flat_map(|needs| {
            let which = [(needs.ttft_out_of_reach, "ttft"), (needs.tpot_out_of_reach, "tpot")];
            which.into_iter().filter_map(|(is_so, name)| is_so.then_some(name))
        });
        let now = self.needs.and_then(|needs| needs.now);
        json!({
            "role": self.role.as_str(),
            "workers": self.workers,
            "needed_workers": needed,
            "because": self.needs.map_or("steps_not_known", |needs| needs.because.as_str()),
            "out_of_reach": out_of_reach.collect::<Vec<_>>(),
            "ranks_of_a_group": self.group,
            "needed_groups": needed.map(|needed| needed / self.group),
            "utilisation": now.map(|now| now.utilisation),
            // JSON has no infinity: `null` is a queue that grows without end
            "queue_ms": now.map(|now| now.queue_ms).filter(|ms| ms.is_finite()),
            "ttft_ms": now.map(|now| now.ttft_ms).filter(|ms| ms.is_finite()),
            "tpot_ms": now.map(|now| now.tpot_ms).filter(|ms| ms.is_finite()),
        })
    }
}

/// What fleets are scaled for.
fn targets(config: &RoutingConfig) -> Targets {
    Targets {
        ttft_ms: config.ttft_deadline.map(|deadline| deadline.as_secs_f64() * 1e3),
        tpot_ms: config.slo_tpot_ms,
    }
}

impl Registry {
    /// The body of `/scale`.
    #[must_use]
    pub fn scale(&self) -> Value {
        let (pools, _) = self.snapshot(self.clock_ms());
        let targets = targets(&self.setup.config.routing);
        let models = pools.iter().map(|pool| {
            let ModelDemand { per_s, prompt_tokens, computed_tokens, output_tokens, .. } = pool.asked;
            json!({
                "model": pool.model,
                "demand": {
                    "requests_per_s": per_s,
                    "waiting": pool.queued,
                    "prompt_tokens": prompt_tokens,
                    "computed_tokens": computed_tokens,
                    "output_tokens": output_tokens,
                },
                "roles": ScaledRole::all(pool, targets).map(|role| role.as_json()).collect::<Vec<_>>(),
            })
        });
        json!({
            "models": models.collect::<Vec<_>>(),
            "slo": {"ttft_ms": targets.ttft_ms, "tpot_ms": targets.tpot_ms},
        })
    }

    /// The same for a scrape.
    pub(super) fn show_scale(
        &self,
        pools: &[PoolSnapshot],
        scrape: &mut Scrape<'_>,
    ) -> fmt::Result {
        let targets = targets(&self.setup.config.routing);
        let all: Vec<_> = pools.iter().flat_map(|pool| ScaledRole::all(pool, targets)).collect();
        let needed = all.iter().filter_map(|role| Some((role.labels(), role.needed()?)));
        scrape.gauges("headrace_scale_needed_workers", "Workers of this role that keep the limits for what is asked of the model; whole groups of ranks.", needed)?;
        let present = all.iter().map(|role| (role.labels(), role.workers));
        scrape.gauges("headrace_scale_workers", "Workers of this role that take work.", present)?;
        let now = || {
            let known = all.iter().filter_map(|role| Some((role, role.needs?.now?)));
            known.map(|(role, now)| (role.labels(), now))
        };
        let queue = now().map(|(labels, now)| (labels, now.queue_ms / 1e3));
        scrape.gauges("headrace_scale_predicted_queue_seconds", "Wait of nine in ten prompts for their turn, at most, as predicted for the workers that there are; +Inf where it grows without end.", queue)?;
        let busy = now().map(|(labels, now)| (labels, now.utilisation));
        scrape.gauges("headrace_scale_utilisation", "Share of their time that these workers spend on prompts and rows, as predicted; 1 is no longer served.", busy)
    }
}
