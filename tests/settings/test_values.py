"""Values of flags: what is read, and what is refused in which words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.settings import values


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1k", 1024), ("1.5GiB", 3 << 29), ("2 MB", 2 << 20), ("1T", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert values.size_bytes(text) == size


@pytest.mark.parametrize(("text", "s"), [("30s", 30), ("2m", 120), ("500ms", 0.5), ("60", 60)])
def test_times(text: str, s: float) -> None:
    assert values.duration(text) == s


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((values.size_bytes, text) for text in ("", "0", "-1", "1.5.5G", "x", "1GG", "٣")),
        *((values.size_bytes, text) for text in ("9" * 30, "99999999999999T", "nan", "0.1")),
        *((values.positive, text) for text in ("0", "-3", "1.5", "", "²", "1e3", "9" * 5_000)),
        *((values.count, text) for text in ("-1", "two", "2147483648")),
        *((values.port_number, text) for text in ("70000", "-1", "http", "65536")),
        *((values.duration, text) for text in ("", "soon", "-1", "nan", "inf", "61m", "1d")),
        *((values.Whole(2, 4), text) for text in ("1", "5")),
        *((values.nonempty, text) for text in ("", "  ")),
        *(
            (values.model_names, text)
            for text in ("", "a,", "a,a", " , b", ",".join("abcdefghijklmnopqr"))
        ),
        *((values.existing_file, text) for text in ("/nonexistent", "/", "x" * 5_000)),
    ],
)
def test_wrong_values_are_refused_in_few_words(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        read(text)
    assert 10 < len(str(refused.value)) < 250


def test_bounds_are_in_the_refusal_and_are_taken() -> None:
    assert [values.port_number(text) for text in ("0", "65535")] == [0, 65_535]
    assert values.count("2147483647") == values.MOST
    with pytest.raises(argparse.ArgumentTypeError, match="'5' is not a whole number from 2 to 4"):
        values.Whole(2, 4)("5")


def test_a_file_that_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    assert values.existing_file(f"{tmp_path}/ca.pem") == tmp_path / "ca.pem"
