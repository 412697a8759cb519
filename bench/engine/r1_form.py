"""What the R1 path costs beside the llama form of the same model: decode steps in turns, and whether answers agree.

    python -m bench.engine.r1_form --out bench/results/r1_form.json

Times are CPU milliseconds of the one computing thread for one decode step with 128 tokens of context. A round measures
every form once, one after the other, so that a drifting machine drifts for all; the ratio to the llama form is taken
within a round, and the median over rounds is given. Agreement is the share of positions of GSM8K questions whose most
likely token is that of the llama form with weights of the same dtype.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from bench.engine.forward import BLOCK, WINDOW, batch_of, cpu_ms, ours
from bench.helpers.report import write
from headrace.models import DType, Model, load_model
from headrace.models.load.source import resolve
from headrace_kernels.upload import tensor_of

FORMS = {"llama": "smollm2", "exact": "smollm2-r1", "paired": "smollm2-r1-paired"}
DTYPES: tuple[DType, ...] = ("float32", "int8")
SIZES = (1, 8, 32)
STEP_S = 0.15  # of one measurement


def speed(models: dict[str, Model], rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        runs = {form: ours(model, "decode", size) for form, model in models.items()}
        times: dict[str, list[float]] = {form: [] for form in runs}
        for _ in range(rounds + 1):  # the first round warms up
            for form, run in runs.items():
                times[form].append(cpu_ms(run, STEP_S))
        base = times["llama"][1:]
        for form, all_ms in times.items():
            ratios = [ms / of_llama for ms, of_llama in zip(all_ms[1:], base, strict=True)]
            rows.append(
                {
                    "form": form,
                    "batch": size,
                    "cpu_ms_per_token": round(statistics.median(all_ms[1:]) / size, 3),
                    "times_llama": round(statistics.median(ratios), 3),
                    "times_llama_range": [round(min(ratios), 3), round(max(ratios), 3)],
                }
            )
    return rows


def agreement(models: dict[str, Model], windows: np.ndarray) -> dict[str, dict[str, float]]:
    """Of every form with the llama form; and the largest difference of a logit."""
    same = dict.fromkeys(models, 0.0)
    furthest = dict.fromkeys(models, 0.0)
    for window in windows:
        logits: dict[str, torch.Tensor] = {}
        for form, model in models.items():
            batch = batch_of(1, WINDOW, 0, window)
            batch.logit_rows = np.arange(WINDOW, dtype=np.int32)
            logits[form] = tensor_of(model.forward(batch)).clone()
            equal = logits[form].argmax(-1) == logits["llama"].argmax(-1)
            same[form] += float(equal.float().mean()) / len(windows)
            difference = float((logits[form] - logits["llama"]).abs().max())
            furthest[form] = max(furthest[form], difference)
    return {
        form: {"agreement": round(same[form], 5), "largest_difference": round(furthest[form], 6)}
        for form in models
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens, for agreement")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoints = {form: resolve(name) for form, name in FORMS.items()}
    text = (Path(__file__).parent / "gsm8k_questions.txt").read_text()
    tokenizer = checkpoints["llama"].path / "tokenizer.json"
    ids = np.array(tokenizers.Tokenizer.from_file(str(tokenizer)).encode(text).ids)
    windows = ids[: args.windows * WINDOW].reshape(-1, WINDOW)
    result: dict[str, Any] = {}
    for dtype in DTYPES:
        models: dict[str, Model] = {
            form: load_model(checkpoint, dtype=dtype, device="cpu", block_tokens=BLOCK)
            for form, checkpoint in checkpoints.items()
        }
        for model in models.values():
            model.allocate_kv(512)
        with torch.inference_mode():
            result[dtype] = {
                "answers": agreement(models, windows),
                "decode": speed(models, args.rounds),
            }
    write(args.out, result)


if __name__ == "__main__":
    main()
