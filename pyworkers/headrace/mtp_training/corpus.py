"""What the model wrote, in files of a few MB each: written once, resumable at any file, read whole for training.

File `n` holds sequences n * SEQUENCES .. (n + 1) * SEQUENCES - 1. Sequence `i` depends on `i`, the seed and the model
only, so an interrupted corpus goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headrace.mtp_training.prompts import Prompt, Prompts, Split
from headrace.mtp_training.writer import Writer, Written

SEQUENCES = 64
# Half of the text is greedy, as evaluations are; 0.2 is the default of SmolLM2's generation config.
TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.2, 0.2, 0.5, 0.7, 0.7, 1.0)
KINDS = ("chat", "prose")


class CorpusError(ValueError):
    """A file of a corpus that is missing or broken; the text names it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    sequences: list[Written]
    digest: str  # of the files, 16 hex digits

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)


def shard_path(directory: Path, shard: int) -> Path:
    return directory / f"{shard:05}.safetensors"


def write_corpus(
    directory: Path,
    make_writer: Callable[[], Writer],
    prompts: Prompts,
    *,
    shards: Sequence[int],
    temperatures: tuple[float, ...] = TEMPERATURES,
    progress: Callable[[int, int], None],
) -> None:
    """Write the files `shards` as far as they are not there yet; `progress(sequences done, of all)`."""
    directory.mkdir(parents=True, exist_ok=True)
    missing = [n for n in shards if not shard_path(directory, n).exists()]
    if not missing:
        return

    def jobs() -> Iterator[tuple[int, Prompt, float]]:
        for shard in missing:
            for i in range(shard * SEQUENCES, (shard + 1) * SEQUENCES):
                yield i, prompts[i], temperatures[i % len(temperatures)]

    done = (len(shards) - len(missing)) * SEQUENCES
    parts: dict[int, list[Written]] = {n: [] for n in missing}
    for written in make_writer().write(jobs()):
        part = parts[written.index // SEQUENCES]
        part.append(written)
        done += 1
        progress(done, len(shards) * SEQUENCES)
        if len(part) == SEQUENCES:
            _save(shard_path(directory, written.index // SEQUENCES), part)
            part.clear()


@dataclass(frozen=True, slots=True)
class Mix:
    """Prompts of a file, and their share of a stream."""

    share: float
    prompts: list[Prompt]


def write_and_read(
    directory: Path,
    make_writer: Callable[[], Writer],
    *,
    split: Split,
    seed: int,
    mixes: list[Mix],
    shards: Sequence[int],
    temperatures: tuple[float, ...],
    origin: dict[str, Any],
    progress: Callable[[int, int], None],
) -> Corpus:
    """The files `shards` of a corpus. Raises `CorpusError` where `directory` holds another one.

    `origin` is what else the text depends on.
    """
    prompts = Prompts(split, seed=seed, extra=[(mix.share, mix.prompts) for mix in mixes])
    known = repr([[mix.share, mix.prompts] for mix in mixes]).encode()
    _check_origin(
        directory / "origin.json",
        {
            "split": split,
            "seed": seed,
            "prompt_files": hashlib.sha256(known).hexdigest()[:16],
            "temperatures": list(temperatures),
            **origin,
        },
    )
    write_corpus(
        directory,
        make_writer,
        prompts,
        shards=shards,
        temperatures=temperatures,
        progress=progress,
    )
    return read_corpus(directory, shards)


def _check_origin(path: Path, origin: dict[str, Any]) -> None:
    """One folder holds text of one origin."""
    text = json.dumps(origin, indent=1)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    elif path.read_text() != text:
        raise CorpusError(
            f"{path.parent}: holds text of another origin; {path.name}: expected {text}, found {path.read_text()}"
        )


def _save(path: Path, sequences: list[Written]) -> None:
    """All or nothing: an interrupted write leaves no file of that name."""
    ordered = sorted(sequences, key=lambda s: s.index)
    arrays = {
        "index": np.array([s.index for s in ordered], np.int64),
        "kind": np.array([KINDS.index(s.kind) for s in ordered], np.uint8),
        "temperature": np.array([s.temperature for s in ordered], np.float32),
        "prompt_len": np.array([s.prompt_len for s in ordered], np.int32),
        "length": np.array([len(s.tokens) for s in ordered], np.int32),
        "tokens": np.concatenate([s.tokens for s in ordered]),
        "hidden": np.concatenate([s.hidden for s in ordered]),
        "top_ids": np.concatenate([s.top_ids for s in ordered]),
        "top_logits": np.concatenate([s.top_logits for s in ordered]),
    }
    partial = path.with_suffix(".partial")
    save_file(arrays, partial)
    partial.replace(path)


def read_corpus(directory: Path, shards: Sequence[int]) -> Corpus:
    """The files `shards`. Raises `CorpusError`."""
    sequences: list[Written] = []
    digest = hashlib.sha256()
    for n in shards:
        path = shard_path(directory, n)
        try:
            data = load_file(path)
            digest.update(data["tokens"].tobytes() + data["temperature"].tobytes())
            rows = token = 0
            for i, length in enumerate(data["length"].tolist()):
                part = slice(rows, rows + length - 1)
                sequences.append(
                    Written(
                        index=int(data["index"][i]),
                        kind=KINDS[data["kind"][i]],
                        temperature=float(data["temperature"][i]),
                        prompt_len=int(data["prompt_len"][i]),
                        tokens=data["tokens"][token : token + length],
                        hidden=data["hidden"][part],
                        top_ids=data["top_ids"][part],
                        top_logits=data["top_logits"][part],
                    )
                )
                rows, token = rows + length - 1, token + length
        except (OSError, SafetensorError, KeyError, IndexError) as error:
            raise CorpusError(f"{path}: not a whole file of a corpus: {error!r}") from error
    return Corpus(sequences, digest.hexdigest()[:16])
