"""Reading JSON objects of a model directory: every fault is an error that says file, key, expected and found."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

__all__ = ["Fields", "ModelConfigError", "ModelFileError", "read_json_object"]


class ModelFileError(ValueError):
    """A file of a model is missing, broken, or asks for something unknown; the text names file and key."""


class ModelConfigError(ModelFileError):
    """A field of config.json or generation_config.json is missing, mistyped, contradictory or unknown."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object whose fields are read with errors that say file, key, expected and found."""

    where: str
    raw: Mapping[str, Any]

    def fail(self, key: str, expected: str) -> ModelConfigError:
        found = f"found {_show(self.raw[key])}" if key in self.raw else "the field is missing"
        return ModelConfigError(f"{self.where}: {key}: expected {expected}, {found}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer of at least `low`. A missing or null field is `default`, if there is one."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
            raise self.fail(key, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`. A missing or null field is `default`, if there is one."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"a number above {above:g}")
        if not math.isfinite(value) or value <= above:
            raise self.fail(key, f"a finite number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def choice(self, key: str, known: Sequence[str], default: str | None = None) -> str:
        """One of `known`. A missing or null field is `default`, or the first of them."""
        value = self.text(key, known[0] if default is None else default)
        if value not in known:
            raise self.fail(key, " or ".join(json.dumps(name) for name in known))
        return value

    def table(self, key: str) -> Mapping[str, Any] | None:
        """A JSON object, or None where the field is missing or null."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(key, "an object")
        return cast("Mapping[str, Any] | None", value)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...] | None:
        """One token id or a list of them; None where the field is missing or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        ids = cast("list[Any]", value) if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.fail(key, f"token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(cast("list[int]", ids)))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or a `ModelConfigError` that says where it stops being one."""
    try:
        value: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path}: expected a JSON object, found {_show(value)}")
    return cast("dict[str, Any]", value)


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
