"""Every crate in Cargo.lock has a licence from deny.toml's list and comes from crates.io."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers.require import needs

ROOT = Path(__file__).parents[2]
ALLOWED = set(tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"])


@functools.cache
def crates() -> list[dict[str, Any]]:
    done = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--locked"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)["packages"]


def allowed(expression: str) -> bool:
    """SPDX expression -> whether the allowed licences satisfy it. An old-style `A/B` is `A OR B`."""
    words = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))
    if "WITH" in words:
        words = re.findall(r"[()]|[^\s()]+ WITH [^\s()]+|[^\s()]+", expression.replace("/", " OR "))

    def any_of() -> bool:
        value = all_of()
        while words[:1] == ["OR"]:
            del words[0]
            value = all_of() or value
        return value

    def all_of() -> bool:
        value = one()
        while words[:1] == ["AND"]:
            del words[0]
            value = one() and value
        return value

    def one() -> bool:
        word = words.pop(0)
        if word != "(":
            return word in ALLOWED
        value = any_of()
        assert words.pop(0) == ")"
        return value

    value = any_of()
    assert not words, f"cannot read the licence {expression!r}"
    return value


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ("MIT", True),
        ("GPL-3.0", False),
        ("GPL-3.0 OR MIT", True),
        ("GPL-3.0 AND MIT", False),
        ("MIT/Apache-2.0", True),
        ("(MIT OR GPL-3.0) AND Unicode-3.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("MIT OR GPL-2.0 AND GPL-3.0", True),
    ],
)
def test_licence_expressions_are_read(expression: str, fits: bool) -> None:
    assert allowed(expression) is fits


@needs("cargo", "there is no cargo", here=shutil.which("cargo") is not None)
def test_every_crate_has_an_allowed_licence() -> None:
    refused = [
        f"{crate['name']} {crate['version']}: {crate['license']}"
        for crate in crates()
        if not (crate["license"] and allowed(crate["license"]))
    ]
    assert refused == []


@needs("cargo", "there is no cargo", here=shutil.which("cargo") is not None)
def test_every_crate_comes_from_the_registry_or_from_here() -> None:
    odd = [
        f"{crate['name']} {crate['source']}"
        for crate in crates()
        if crate["source"] is not None and not crate["source"].startswith("registry+")
    ]
    assert odd == []
