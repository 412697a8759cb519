"""A slice of `make fuzz` that takes seconds: the targets in Python, always with the same inputs."""

from __future__ import annotations

import random

import pytest

from fuzz import files
from fuzz.mutate import mutated

NAMES = ("safetensors", "gguf", "events")


@pytest.mark.parametrize("name", NAMES)
def test_what_others_wrote_is_read_or_refused(name: str) -> None:
    with files.targets() as targets:
        assert tuple(target.name for target in targets) == NAMES
        target = targets[NAMES.index(name)]
        count, refused = files.run(target, seed=7, seconds=60, inputs=600)
    assert count == 600
    assert 0 < refused < count, (
        "the changes are too small, or so large that nothing is read any more"
    )


def test_a_fault_names_its_input() -> None:
    def broken(data: bytes) -> None:
        if data[:1] != b"a":
            raise KeyError("no a")

    target = files.Target("broken", [b"abc"], broken, (ValueError,))
    with pytest.raises(files.Fault, match=r"broken, input \d+: KeyError") as caught:
        files.run(target, seed=1, seconds=60, inputs=1000)
    assert caught.value.data[:1] != b"a"


def test_an_input_may_neither_take_long_nor_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: bytes) -> None:
        while True:
            pass

    def large(_: bytes) -> None:
        bytearray(2 * files.MEMORY_BYTES)

    monkeypatch.setattr(files, "ONE_S", 0.05)
    for read, what in ((large, "MemoryError"), (slow, "TooSlow")):
        target = files.Target("hungry", [b"abc"], read, (ValueError,))
        with pytest.raises(files.Fault, match=what):
            files.run(target, seed=1, seconds=60, inputs=1)


def test_the_same_seed_changes_the_same_bytes() -> None:
    one, two = random.Random(3), random.Random(3)
    seeds = [bytes(range(200)), b"{}"]
    changed = [mutated(seeds, one) for _ in range(200)]
    assert changed == [mutated(seeds, two) for _ in range(200)]
    assert len(set(changed)) > 150
