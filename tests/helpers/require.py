"""What a test needs of the machine. A test without it is skipped, or fails where `HEADRACE_REQUIRE` has the name.

    HEADRACE_REQUIRE=etcd,netns make test

So a machine that is known to have something cannot lose it, and with it the tests, without anyone noticing.
"""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest

VARIABLE = "HEADRACE_REQUIRE"
# Packages are looked for when pytest starts, as `pytest.importorskip` skips whole files.
PACKAGES = frozenset({"matplotlib", "triton"})
NAMES = PACKAGES | {
    "avx2",
    "avx512",
    "avx512vnni",  # a test in Rust alone
    "cargo",
    "chromium",  # a browser; tests install Debian's where they may
    "cuda",
    "curl",
    "e4m3",  # missing on a GPU without 8-bit floats; Triton's interpreter has them
    "etcd",
    "hadolint",
    "linux",
    "maturin",
    "mounts",  # of a user who is root in a namespace of their own
    "netns",
    "nixl",
    "no-torch",  # an environment without it
    "no-gpu",  # what has ranks of one process stand for GPUs
    "oldest-triton",  # `make compile-table` puts it under target/
    "openssl",
    "promtool",  # and prometheus, which come together
    "small-shm",  # a /dev/shm that the largest group would fill
    "systemd",  # systemd-analyze
}


def required() -> frozenset[str]:
    """The names in `HEADRACE_REQUIRE`. Raises pytest.UsageError for a name that no test knows."""
    names = frozenset(name.strip() for name in os.environ.get(VARIABLE, "").split(",")) - {""}
    if unknown := names - NAMES:
        known = ", ".join(sorted(NAMES))
        raise pytest.UsageError(f"{VARIABLE}: unknown {', '.join(sorted(unknown))}; known: {known}")
    return names


def check_packages() -> None:
    """Raises pytest.UsageError if a required package is not installed."""
    for name in sorted(required() & PACKAGES):
        if importlib.util.find_spec(name) is None:
            raise pytest.UsageError(f"{VARIABLE} names {name}, which is not installed")
    if "no-torch" in required() and importlib.util.find_spec("torch") is not None:
        raise pytest.UsageError(f"{VARIABLE} names no-torch, and torch is installed")


def missing(name: str, why: str) -> NoReturn:
    """Skip the test, because the machine lacks `name`; fail it if `name` is required."""
    assert name in NAMES, f"add {name} to NAMES"
    if name in required():
        pytest.fail(f"{VARIABLE} names {name}: {why}", pytrace=False)
    pytest.skip(why)


def needs(name: str, why: str, *, here: bool) -> pytest.MarkDecorator:
    """A mark: without `here`, the test is skipped or fails, as by `missing`."""
    return pytest.mark.needs(name, why, here)


def check_marks(item: pytest.Item) -> None:
    """Hold a test to its marks of `needs`, before its fixtures are made."""
    for mark in item.iter_markers("needs"):
        name, why, here = mark.args
        if not here:
            missing(name, why)
