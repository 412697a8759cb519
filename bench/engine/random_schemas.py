"""Random JSON schemas, and random answers that are held to them: what is finished has to be valid.

    make schemas OUT=bench/results/random_schemas.json

Schemas are made of the keywords of the JSON Schema test suite, by seed. Each is compiled, or refused by a message that
names the keyword; an answer is a walk through the masks that likes to come to an end. `jsonschema` is the judge, which
shares no code with the masks. Where the packages `xgrammar` and `llguidance` can be imported, their verdicts stand
beside ours: what they accept, and how many of their answers are valid. `llguidance` is called as vLLM's backend
`guidance` does, which refuses no keyword itself.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from numpy.typing import NDArray

from headrace._core import AnswerRules, GrammarRows, GrammarVocabulary

SCHEMAS = 1000
LONGEST = 400
DEEPEST = 3
WORDS = ["a", "b", "name", "kind", "x y", "ü", 'q"', "0"]
PATTERNS = ["^[a-z]{1,4}$", "^(ab|cd)+$", "[0-9]", "^x", "^\\d{2}-\\d{2}$"]
FORMATS = ["date", "date-time", "uuid", "ipv4", "email", "time", "hostname", "uri"]
Bools = NDArray[np.bool_]
Walk = Callable[[Callable[[Bools], int]], str | None]


class SchemaMaker:
    """Schemas by seed. `rare` keywords are those that may be refused."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self, depth: int = 0) -> Any:
        chance = self._random.random()
        if depth == 0:
            made = self._of_type("object" if chance < 0.7 else "array", depth)
            if self._random.random() < 0.2:
                made["$defs"] = {"part": self.schema(DEEPEST)}
                made.setdefault("properties", {})["ref"] = {"$ref": "#/$defs/part"}
                if made["type"] == "array":
                    del made["properties"]
            return made
        if chance < 0.04:
            return True
        if chance < 0.14:
            return {"enum": [self._value() for _ in range(self._random.randint(1, 4))]}
        if chance < 0.2:
            return {"const": self._value()}
        if chance < 0.3 and depth < DEEPEST:
            word = self._random.choice(["anyOf", "anyOf", "oneOf", "allOf"])
            return {word: [self.schema(depth + 1) for _ in range(self._random.randint(1, 3))]}
        if chance < 0.33:
            return self._rare()
        if chance < 0.38:
            types = self._random.sample(["string", "integer", "null", "boolean", "number"], 2)
            return {"type": types}
        simple = ["string", "string", "integer", "number", "boolean", "null"]
        return self._of_type(
            self._random.choice(simple + (["object", "array"] * 2 if depth < DEEPEST else [])),
            depth,
        )

    def _value(self) -> Any:
        return self._random.choice([None, True, 0, -3, 2.5, "", "a b", "é\n", [1], {"k": "v"}, "x"])

    def _of_type(self, kind: str, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": kind}
        if self._random.random() < 0.15:
            made["description"] = "what it is"
        match kind:
            case "object":
                self._object(made, depth)
            case "array":
                self._array(made, depth)
            case "string":
                self._string(made)
            case "integer" | "number":
                self._number(made, whole=kind == "integer")
            case _:
                pass
        return made

    def _object(self, made: dict[str, Any], depth: int) -> None:
        names = self._random.sample(WORDS, self._random.randint(0, 4))
        made["properties"] = {name: self.schema(depth + 1) for name in names}
        made["required"] = [name for name in names if self._random.random() < 0.6]
        chance = self._random.random()
        if chance < 0.6:
            made["additionalProperties"] = False
        elif chance < 0.8:
            made["additionalProperties"] = self.schema(depth + 1)
        if self._random.random() < 0.06:
            made["patternProperties"] = {"^p_": self.schema(depth + 1)}
        if self._random.random() < 0.04:
            made["minProperties"] = 1
        if self._random.random() < 0.03 and names:
            made["dependentRequired"] = {names[0]: names[-1:]}

    def _array(self, made: dict[str, Any], depth: int) -> None:
        if self._random.random() < 0.25:
            made["prefixItems"] = [self.schema(depth + 1) for _ in range(2)]
        if self._random.random() < 0.9:
            made["items"] = self.schema(depth + 1)
        if self._random.random() < 0.5:
            made["minItems"] = self._random.randint(0, 2)
        if self._random.random() < 0.7:
            made["maxItems"] = self._random.randint(2, 4)
        if self._random.random() < 0.04:
            made["uniqueItems"] = True
        if self._random.random() < 0.03:
            made["contains"] = {"type": "integer"}

    def _string(self, made: dict[str, Any]) -> None:
        chance = self._random.random()
        if chance < 0.2:
            made["pattern"] = self._random.choice(PATTERNS)
        elif chance < 0.35:
            made["format"] = self._random.choice(FORMATS)
        elif chance < 0.7:
            made["minLength"] = self._random.randint(0, 3)
            made["maxLength"] = self._random.randint(3, 12)

    def _number(self, made: dict[str, Any], *, whole: bool) -> None:
        if self._random.random() < 0.5:
            low = self._random.randint(-50, 50)
            word = self._random.choice(["minimum", "exclusiveMinimum"])
            made[word] = low if whole or self._random.random() < 0.5 else low + 0.25
            if self._random.random() < 0.7:
                word = self._random.choice(["maximum", "exclusiveMaximum"])
                made[word] = low + self._random.randint(2, 1000)
        if self._random.random() < 0.08:
            made["multipleOf"] = self._random.choice([2, 5, 10] if whole else [2, 0.5])

    def _rare(self) -> Any:
        rare: list[Any] = [
            {"not": {"type": "string"}},
            {"if": {"type": "string"}, "then": {"maxLength": 2}},
            {"type": "object", "propertyNames": {"maxLength": 3}},
            {"type": "array", "unevaluatedItems": False},
            {"type": "string", "contentEncoding": "base64"},
        ]
        return self._random.choice(rare)


def byte_vocabulary() -> tuple[GrammarVocabulary, list[bytes], int]:
    """All single bytes, what JSON has often, and an end."""
    words = [*(bytes([byte]) for byte in range(256)), b'":', b'",', b'"}', b"true", b"null", b"], "]
    return GrammarVocabulary.of_tokens([*words, b"\xffend"], [len(words)]), words, len(words)


def likes_ends(words: list[bytes], end: int, seed: int) -> Callable[[Bools], int]:
    """Chooses among allowed tokens: the end as a rule, then what closes something, then anything."""
    random = np.random.default_rng(seed)
    weights = np.ones(max(len(words), end + 1))
    closing = re.compile(rb'^["}\]][,:}]?$')
    weights[[place for place, word in enumerate(words) if closing.match(word)]] = len(words)
    weights[[place for place, word in enumerate(words) if word.isspace()]] = 0.01
    weights[end] = 1e9

    def choose(allowed: Bools) -> int:
        own = weights * allowed[: len(weights)]
        return int(random.choice(len(own), p=own / own.sum()))

    return choose


def ours(vocabulary: GrammarVocabulary, words: list[bytes], end: int, schema: Any) -> Walk:
    """Raises `ValueError` where the schema is refused."""
    rules = AnswerRules(vocabulary.compile("json", json.dumps(schema)))
    rows = GrammarRows(vocabulary.tokens, 1)
    row, one, none = np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int32)

    def walk(choose: Callable[[Bools], int]) -> str | None:
        rows.take(0, rules, [])
        text = b""
        for _ in range(LONGEST):
            rows.begin(row, one, none)
            bits = np.unpackbits(rows.masks()[0].view(np.uint8), bitorder="little")
            token = choose(bits.astype(np.bool_))
            if token == end:
                return decoded(text)
            text += words[token]
            if rows.advance(row, one, np.array([token]))[0]:
                return decoded(text)
        return None

    return walk


def xgrammar_walks(words: list[bytes], end: int) -> Callable[[Any], Walk] | None:
    """The same by `xgrammar`, as it comes; `None` without it."""
    try:
        import xgrammar  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    xg: Any = xgrammar
    tokens = [*words, b"</s>"]
    info = xg.TokenizerInfo(tokens, stop_token_ids=[end])
    compiler = xg.GrammarCompiler(info)

    def compiled(schema: Any) -> Walk:
        grammar = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

        def walk(choose: Callable[[Bools], int]) -> str | None:
            matcher, text = xg.GrammarMatcher(grammar), b""
            mask = xg.allocate_token_bitmask(1, info.vocab_size)
            for _ in range(LONGEST):
                matcher.fill_next_token_bitmask(mask)
                bits = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")
                token = choose(bits.astype(np.bool_))
                if token == end:
                    return decoded(text)
                text += words[token]
                matcher.accept_token(token)
            return None

        return walk

    return compiled


class ByteTokenizer:
    """What `llguidance` asks of a tokenizer: the bytes of its tokens, and a text as tokens."""

    def __init__(self, words: list[bytes], end: int) -> None:
        self.tokens, self.special_token_ids = [*words, b"</s>"], [end]
        self.eos_token_id, self.bos_token_id = end, None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)  # a byte's token has its number


def llguidance_walks(words: list[bytes], end: int) -> Callable[[Any], Walk] | None:
    """The same by `llguidance` as vLLM's backend of its name calls it; `None` without it."""
    try:
        import llguidance  # pyright: ignore[reportMissingImports]
        import llguidance.numpy  # pyright: ignore[reportMissingImports, reportUnusedImport] - loads it
    except ImportError:
        return None
    ll: Any = llguidance
    tokenizer = ll.LLTokenizer(ll.TokenizerWrapper(ByteTokenizer(words, end)))

    def compiled(schema: Any) -> Walk:
        # `serialize_guidance_grammar` and `validate_guidance_grammar` of vLLM 0.33 with its defaults
        defaults = {"whitespace_flexible": True}
        grammar = ll.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
        problem = ll.LLMatcher.validate_grammar(grammar, tokenizer)
        if problem:
            raise ValueError(problem)

        def walk(choose: Callable[[Bools], int]) -> str | None:
            matcher, text = ll.LLMatcher(tokenizer, grammar, log_level=0), b""
            mask = ll.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
            for _ in range(LONGEST):
                ll.numpy.fill_next_token_bitmask(matcher, mask, 0)
                bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
                token = choose(bits.astype(np.bool_))
                if token == end:
                    return decoded(text)
                text += words[token]
                matcher.consume_token(token)
            return None

        return walk

    return compiled


def decoded(text: bytes) -> str:
    """The answer; nothing, which is no JSON, where it is no UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""


def is_valid(schema: Any, text: str) -> bool:
    judge = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    try:
        return judge.is_valid(json.loads(text))
    except ValueError:
        return False


def keyword(message: str) -> str:
    """What a refusal names."""
    known = re.findall(r'"([a-zA-Z$]+)"|`([a-zA-Z$]+)`|Unimplemented keys: \["?(\w+)', message)
    names = [next(filter(None, found)) for found in known]
    return names[0] if names else re.sub(r"^\[.*?: ", "", message).split(":")[0][:80]


def judged(
    schemas: list[Any], compiled: Callable[[Any], Walk], words: list[bytes], end: int
) -> Any:
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    invalid: list[Any] = []
    for seed, schema in enumerate(schemas):
        try:
            walk = compiled(schema)
        except (ValueError, RuntimeError) as error:
            counts["refused"] += 1
            refusals[keyword(str(error))] += 1
            continue
        counts["accepted"] += 1
        text = walk(likes_ends(words, end, seed))
        if text is None:
            counts["cut"] += 1
        elif is_valid(schema, text):
            counts["valid"] += 1
        else:
            counts["invalid"] += 1
            invalid.append({"schema": schema, "answer": text})
    return {**counts, "refusals": dict(refusals.most_common(12)), "examples": invalid[:5]}


def main() -> None:
    from bench.helpers.report import write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--schemas", type=int, default=SCHEMAS)
    options = parser.parse_args()
    schemas = [SchemaMaker(seed).schema() for seed in range(options.schemas)]
    vocabulary, words, end = byte_vocabulary()
    found = {"headrace": judged(schemas, lambda it: ours(vocabulary, words, end, it), words, end)}
    others = {"xgrammar": xgrammar_walks, "vLLM, guidance": llguidance_walks}
    for name, walks in others.items():
        other = walks(words, end)
        if other is not None:
            found[name] = judged(schemas, other, words, end)
    write(options.out, {"schemas": options.schemas, "of": found})


if __name__ == "__main__":
    main()
