"""`HEADRACE_REQUIRE`: what it names is not skipped, what it misspells is refused, and no skip goes past it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from helpers import require

TESTS = Path(__file__).resolve().parents[1]


def skips(path: Path) -> list[str]:
    """Every way of skipping in this file that asks nobody."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in ("skip", "skipif")
        and id(node) not in parts  # such as pytest.skip.Exception
    ]


def packages(path: Path) -> set[str]:
    """Packages without which this file is skipped."""
    return {
        str(ast.literal_eval(node.args[0]))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "importorskip"
    }


def test_every_skip_has_a_name() -> None:
    files = [path for path in TESTS.rglob("*.py") if path != Path(require.__file__)]
    assert [skip for path in files for skip in skips(path)] == [], "use helpers.require"
    assert {name for path in files for name in packages(path)} <= require.PACKAGES


def test_nothing_is_required_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(require.VARIABLE, raising=False)
    assert require.required() == frozenset()
    with pytest.raises(pytest.skip.Exception, match="it is not here"):
        require.missing("etcd", "it is not here")


def test_a_required_name_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(require.VARIABLE, " netns, etcd,")
    assert require.required() == {"etcd", "netns"}
    with pytest.raises(pytest.fail.Exception, match="HEADRACE_REQUIRE names etcd: it is not here"):
        require.missing("etcd", "it is not here")
    with pytest.raises(pytest.skip.Exception):
        require.missing("nixl", "it is not here")


def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(require.VARIABLE, "etcd,nixle")
    with pytest.raises(pytest.UsageError, match=r"unknown nixle; known: .*nixl"):
        require.check_packages()


def test_a_required_package_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(require.VARIABLE, "matplotlib")
    require.check_packages()

    def nothing(name: str) -> None:
        assert name == "matplotlib"

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(pytest.UsageError, match="matplotlib, which is not installed"):
        require.check_packages()
