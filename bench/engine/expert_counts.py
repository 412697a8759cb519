"""How often a router of real text chooses each expert: recorded counts, for placements and for the gate.

    python -m bench.engine.expert_counts --out bench/results/expert_counts.json

The model is the paired form of SmolLM2 (`smollm2-r1-paired`): 29 layers with 32 experts, of which the token decides 16.
The text is that of GSM8K's questions, and after it the licence of this repository: another kind of text. Counts are of
windows of 512 tokens, one after the other; a line of the result has those of one layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tokenizers
import torch

from bench.engine.forward import BLOCK, WINDOW, batch_of
from bench.helpers.report import ROOT, write
from headrace.models import load_model
from headrace.models.deepseek import Deepseek
from headrace.models.load.source import resolve

MODEL = "smollm2-r1-paired"
TEXTS = {"questions": ROOT / "bench/engine/gsm8k_questions.txt", "licence": ROOT / "LICENSE"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--windows", type=int, default=12, help="of each text at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = resolve(MODEL)
    model = load_model(checkpoint, dtype="int8", device="cpu", block_tokens=BLOCK, mtp=False)
    assert isinstance(model, Deepseek)
    model.allocate_kv(WINDOW // BLOCK)
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    layers = [layer.experts for layer in model.expert_layers]
    recorded: dict[str, list[list[str]]] = {}
    before = np.zeros((len(layers), 32), np.int64)
    for name, path in TEXTS.items():
        ids = np.array(tokenizer.encode(path.read_text()).ids)
        windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)[: args.windows]
        recorded[name] = []
        for window in windows:
            model.forward(batch_of(1, WINDOW, 0, window))
            now = np.stack([model.slot_store.expert_counts(layer) for layer in layers])
            recorded[name].append([" ".join(map(str, row)) for row in (now - before).tolist()])
            before = now
    write(args.out, {"model": MODEL, "window_tokens": WINDOW, "counts": recorded})


if __name__ == "__main__":
    main()
