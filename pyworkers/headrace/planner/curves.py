"""Lines through measured points that never fall: more work never takes less time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight between its points, level before the first and after the last."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """A point below one before it is noise of its measurement, and lifted to it."""
        best: dict[float, float] = {}
        for x, y in sorted(points):
            best[x] = max(y, best.get(x, 0.0))
        level, ys = 0.0, list[float]()
        for y in best.values():
            level = max(level, y)
            ys.append(level)
        return cls(tuple(best), tuple(ys))

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        if x >= xs[-1]:
            return ys[-1]
        right = bisect_left(xs, x)
        left = right - 1
        slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
        return ys[left] + slope * (x - xs[left])


@dataclass(frozen=True, slots=True)
class Surface:
    """A curve for each of some values of the first coordinate."""

    xs: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float, float]]) -> Surface:
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, y, z in sorted(points):
            rows.setdefault(x, []).append((y, z))
        return cls(tuple(rows), tuple(Curve.through(row) for row in rows.values()))

    def at(self, x: float, y: float) -> float:
        return Curve.through(zip(self.xs, (c.at(y) for c in self.curves), strict=True)).at(x)
