"""A slice of `make schemas`: random schemas, random answers, for each kind of vocabulary that models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engine.grammar_masks import byte_words
from bench.engine.random_schemas import SchemaMaker, byte_vocabulary, judged, ours
from headrace._core import GrammarVocabulary
from headrace.models.load.default_model import ensure_default_model
from headrace.models.load.source import resolve

DATA = Path(__file__).parents[2] / "data"
SCHEMAS = [SchemaMaker(seed).schema() for seed in range(1000, 1060)]


def document(name: str) -> dict[str, Any]:
    """What a worker would send of a model with this tokenizer."""
    tokenizer = json.loads((DATA / f"tokenizer_{name}.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab: dict[str, int] = tokenizer["model"]["vocab"] | added
    return {
        "tokenizer": json.dumps(tokenizer),
        "chat_template": None,
        "context_tokens": 2048,
        "vocab_size": max(vocab.values()) + 1,
        "eos_token_ids": [max(added.values())],
        "vocab": vocab,
    }


def byte_level() -> tuple[GrammarVocabulary, list[bytes], int]:
    made = document("byte_level")
    del made["vocab"]
    words = byte_words(json.loads(made["tokenizer"]), made["vocab_size"])
    return GrammarVocabulary(json.dumps(made).encode()), words, made["eos_token_ids"][0]


def metaspace() -> tuple[GrammarVocabulary, list[bytes], int]:
    """In the manner of sentencepiece: a sign for spaces, and tokens for bytes that no other token has."""
    made = document("byte_fallback")
    vocab = made.pop("vocab")
    words = [b""] * made["vocab_size"]
    for token, place in vocab.items():
        is_byte = len(token) == 6 and token.startswith("<0x")
        text = token.replace("\u2581", " ").encode()
        words[place] = bytes([int(token[3:5], 16)]) if is_byte else text
    return GrammarVocabulary(json.dumps(made).encode()), words, made["eos_token_ids"][0]


def default_model() -> tuple[GrammarVocabulary, list[bytes], int]:
    ensure_default_model()
    read = resolve("smollm2").doc()
    fields = json.loads(read)
    words = byte_words(json.loads(fields["tokenizer"]), int(fields["vocab_size"]))
    return GrammarVocabulary(read), words, int(fields["eos_token_ids"][0])


@pytest.mark.parametrize(
    ("made", "schemas"),
    [(byte_vocabulary, 60), (byte_level, 20), (metaspace, 20), (default_model, 6)],
)
def test_every_finished_answer_to_a_random_schema_is_valid(made: Any, schemas: int) -> None:
    vocabulary, words, end = made()
    found = judged(SCHEMAS[:schemas], lambda it: ours(vocabulary, words, end, it), words, end)
    assert found.get("invalid", 0) == 0, found["examples"]
    assert found["accepted"] >= 0.6 * schemas
    assert found["valid"] >= 0.9 * found["accepted"]


def test_what_is_not_enforced_is_refused_by_name() -> None:
    vocabulary, words, end = byte_vocabulary()
    for schema, name in [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "if"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ]:
        with pytest.raises(ValueError, match=name):
            ours(vocabulary, words, end, schema)
