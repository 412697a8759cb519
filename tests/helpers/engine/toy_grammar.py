"""A vocabulary for the toy model's 50 tokens, and grammars that it can follow."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from typing import Any

from headrace._core import GrammarVocabulary
from headrace.wire.frames import Grammar, GrammarKind, Sampling

END = 49
WORDS = [*'{}[]":,-. ', *string.digits, *string.ascii_lowercase, '":', '",', "true"]
assert len(WORDS) == END

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["x", "yz", 7]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["age", "kind", "tags", "name"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON, json.dumps(SCHEMA))
REGEX = Grammar(GrammarKind.REGEX, "[a-f]{3,9}-[0-9]+(xy|true){2}")
CHOICE = Grammar(GrammarKind.LARK, 'start: "yes" | "no" | "note"')
LARK = Grammar(GrammarKind.LARK, 'start: "[" pair ("," pair)* "]"\npair: /[a-c]+/ ":" /[0-9]{1,3}/')
GRAMMARS = {"json": JSON, "regex": REGEX, "choice": CHOICE, "lark": LARK}


def toy_vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary.of_tokens([*(word.encode() for word in WORDS), b"\xffend"], [END])


def text_of(ids: list[int]) -> str:
    return "".join(WORDS[token] for token in ids if token != END)


def follows(grammar: Grammar, **more: Any) -> Sampling:
    return replace(Sampling(temperature=1.3), grammar=grammar, **more)


def too_ambiguous() -> Grammar:
    """An x, and as many a's as you like, in more ways with each of them: a bound of the parser is met at the second or
    third.
    """
    names = [f"s{number}" for number in range(10)]
    pairs = " | ".join(f"{left} {right}" for left in names for right in names)
    rules = [f'{name}: "a" | {pairs}' for name in names]
    return Grammar(GrammarKind.LARK, "\n".join(['start: "x" s0', *rules]))
