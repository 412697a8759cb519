"""Rows of a table as lines of a terminal."""

from __future__ import annotations


def aligned(rows: list[list[str]], words: set[int]) -> list[str]:
    """The columns `words` begin at one place, the others, numbers, end at one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
