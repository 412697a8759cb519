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
    """A curve for each of some values of the first coordinate, none below the one before it."""

    xs: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float, float]]) -> Surface:
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, y, z in sorted(points):
            rows.setdefault(x, []).append((y, z))
        ys = sorted({y for row in rows.values() for y, _ in row})
        curves: list[Curve] = []
        for row in rows.values():
            curve = Curve.through(row)
            if curves:  # all their corners, so that one line is above the other between them, too
                below = curves[-1]
                curve = Curve.through((y, max(curve.at(y), below.at(y))) for y in ys)
            curves.append(curve)
        return cls(tuple(rows), tuple(curves))

    def at(self, x: float, y: float) -> float:
        xs = self.xs
        if x <= xs[0]:
            return self.curves[0].at(y)
        if x >= xs[-1]:
            return self.curves[-1].at(y)
        right = bisect_left(xs, x)
        near, far = self.curves[right - 1].at(y), self.curves[right].at(y)
        return near + (far - near) * (x - xs[right - 1]) / (xs[right] - xs[right - 1])
