//! The costs are those of a formula that was written down a second time, in Python: `tests/routing/formula.py`.

use serde::Deserialize;

use super::*;
use crate::core::transfer::TransferCost;

#[derive(Deserialize)]
struct Side {
    load: WorkerLoad,
    queue: PromptQueue,
    demand: Demand,
}

#[derive(Deserialize)]
struct Row {
    role: String,
    #[serde(flatten)]
    one: Option<Side>,
    prefill: Option<Side>,
    decode: Option<Side>,
    cost: Option<TransferCost>,
    block_bytes: Option<f64>,
    estimate: Estimate,
}

impl Row {
    fn estimate(&self) -> Estimate {
        let (Some(prefill), Some(decode)) = (&self.prefill, &self.decode) else {
            let Side { load, queue, demand } = self.one.as_ref().expect("a worker");
            return match &*self.role {
                "both" => estimate(load, queue, demand),
                "decode" => alone(load, queue, demand),
                "prefill" => prefill_leg(load, queue, demand),
                other => panic!("{other}"),
            };
        };
        let source = prefill_leg(&prefill.load, &prefill.queue, &prefill.demand);
        let whole = alone(&decode.load, &decode.queue, &decode.demand);
        let bytes = self.block_bytes.expect("of a pair");
        let leg = DecodeLeg::new(&decode.load, &decode.queue, &decode.demand, bytes, &whole);
        let from = Source::new(&prefill.load, &prefill.demand, &source);
        leg.with(&source, leg.transfer_ms(&from, self.cost.as_ref().expect("of a pair")))
    }
}

#[test]
fn each_row_of_the_table_costs_what_its_formula_says() {
    let rows = include_str!("../../../../tests/routing/estimates.json");
    let rows: Vec<Row> = serde_json::from_str(rows).unwrap();
    assert!(rows.len() > 50);
    let terms = |estimate: &Estimate| {
        let Estimate { queue_ms, prefill_ms, transfer_ms, decode_ms, .. } = *estimate;
        let Estimate { interference_ms, saturation_ms, .. } = *estimate;
        [queue_ms, prefill_ms, transfer_ms, decode_ms, interference_ms, saturation_ms]
    };
    for (number, row) in rows.iter().enumerate() {
        let (got, expected) = (row.estimate(), row.estimate);
        // steps that are shared out alike are taken together, at their mean: which of them hide behind other ranks is not told apart
        let sides = [&row.one, &row.prefill, &row.decode].into_iter().flatten();
        let leaps = |side: &Side| side.load.group_ms > 0.0 && !side.queue.prompts.is_empty();
        let exact = if sides.into_iter().any(leaps) { 0.02 } else { 1e-9 };
        for (term, (got, expected)) in terms(&got).into_iter().zip(terms(&expected)).enumerate() {
            let off = (got - expected).abs();
            assert!(
                off <= exact * expected.abs().max(1.0),
                "row {number}, {}, term {term}: {got}, not {expected}",
                row.role
            );
        }
    }
}
