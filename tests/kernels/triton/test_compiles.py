"""Every Triton kernel compiles once for Hopper and Blackwell, fits and does not spill, known without having a GPU.

Only kernels that the committed table does not know are compiled; `make compile-table` writes it.
"""

import functools
import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from compile_table import table
from compile_table.launches import words
from compile_table.tritons import OLDEST, Found, measured, run
from helpers.require import missing, needs

pytestmark = pytest.mark.timeout(900)

TRITONS = pytest.mark.parametrize(
    "path",
    [
        None,
        pytest.param(
            OLDEST,
            marks=needs("oldest-triton", "`make compile-table` installs it", here=OLDEST.exists()),
        ),
    ],
    ids=["newest", "oldest"],
)


@functools.cache
def found_with(path: Path | None) -> Found:
    return measured(path)


@TRITONS
def test_kernels_compile_once_fit_and_do_not_spill(path: Path | None) -> None:
    found = found_with(path)
    assert found.missing == []
    assert found.again == []
    assert table.too_much(found.rows) == []


@TRITONS
def test_the_committed_table_is_of_these_kernels(path: Path | None) -> None:
    rows = found_with(path).rows
    here = {row["triton"] for row in rows}
    assert len(here) == 1
    committed = [row for row in table.load() if row["triton"] in here]
    if not committed and path is None:
        missing("triton", f"the table is not of Triton {here.pop()}")
    assert {row["key"] for row in committed} == {row["key"] for row in rows}, "make compile-table"


def test_the_committed_table_is_of_this_code_with_every_triton() -> None:
    """Also with those that are not installed."""
    code = {row["kernel"]: row["source"] for row in found_with(None).rows}
    tritons = {row["triton"] for row in table.load()}
    assert {name.rpartition(".")[0] for name in tritons} >= {"3.6"}
    for triton in tritons:
        of_it = {row["kernel"]: row["source"] for row in table.load() if row["triton"] == triton}
        assert of_it == code, f"Triton {triton}: make compile-table"


def test_nothing_in_the_committed_table_is_too_much() -> None:
    assert table.load()
    assert table.too_much(table.load()) == []


@pytest.mark.thorough
def test_a_kernel_that_spills_is_found() -> None:
    rows = json.loads(run("compile_table.spilling", []))
    (fault,) = table.too_much(rows)
    assert "_spilling_kernel for sm_90" in fault and "spills" in fault


def test_a_kernel_that_does_not_fit_is_found() -> None:
    row = dict(table.load()[0])
    assert table.too_much([row]) == []
    row["shared_bytes"] = table.SHARED_BYTES[row["sm"]] + 1
    assert len(table.too_much([row])) == 1


def test_what_changes_no_code_compiles_nothing_again() -> None:
    code = "def f(x):\n    if x:\n        return 1\n"
    assert words(code) == words("def f(x):  # why\n\n  if x:\n    return 1  # one\n")
    assert words(code) != words("def f(x):\n    if x:\n        return 2\n")
    assert words(code) != words("def f(x):\n    if x:\n        pass\n    return 1\n")
