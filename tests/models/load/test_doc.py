"""The model document and the fingerprints: their fields, their sources, and what changes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models.load.checkpoint import SafetensorsCheckpoint
from headrace.models.load.doc import ModelDocError, read_model_files
from helpers.models.tiny_model import CHAT_TEMPLATE, tiny_llama


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_document_holds_what_the_contract_lists(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    edit(directory / "generation_config.json", temperature=0.7, top_p=0.9, do_sample=True)
    document = json.loads(SafetensorsCheckpoint(directory).doc())
    assert document.pop("tokenizer") == (directory / "tokenizer.json").read_text()
    assert document == {
        "chat_template": CHAT_TEMPLATE,
        "eos_token_ids": [2],
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "context_tokens": 512,
        "vocab_size": 285,
        "generation": {"temperature": 0.7, "top_p": 0.9},
    }


def test_a_template_in_its_own_file_wins(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    (directory / "chat_template.jinja").write_text("own ü", encoding="utf-8")
    assert read_model_files(directory).chat_template == "own ü"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("one", "one"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
    ],
)
def test_templates_of_every_form_are_read(
    tmp_path: Path, template: object, expected: str | None
) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    edit(directory / "tokenizer_config.json", chat_template=template)
    assert read_model_files(directory).chat_template == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"chat_template": 3}, "chat_template: expected a string or a list"),
        ({"chat_template": [{"name": "x"}]}, "chat_template: expected a string or a list"),
        ({"chat_template": []}, "none of an empty list is named 'default'"),
        (
            {"chat_template": [{"name": n, "template": n} for n in "ab"]},
            "none of a, b is named 'default'",
        ),
        ({"eos_token": 2}, "eos_token: expected a string or an object with 'content', found 2"),
        ({"eos_token": {"lstrip": False}}, "eos_token: expected a string or an object"),
    ],
)
def test_a_broken_tokenizer_config_is_named(
    tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    edit(directory / "tokenizer_config.json", **fields)
    with pytest.raises(ModelDocError) as caught:
        read_model_files(directory)
    assert "tokenizer_config.json" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{", "not valid"),
        (b"3", "an object|JSON"),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tiny_llama(tmp_path / "tiny") / "tokenizer.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ModelDocError, match=rf"tokenizer.json: .*({text})"):
        read_model_files(path.parent)


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    token = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False}
    edit(directory / "tokenizer_config.json", eos_token=token, bos_token=None)
    files = read_model_files(directory)
    assert (files.eos_token, files.bos_token) == ("<|im_end|>", None)


def test_eos_comes_from_the_tokenizer_where_no_config_says(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny", eos_token_id=None)
    (directory / "generation_config.json").unlink()
    assert json.loads(SafetensorsCheckpoint(directory).doc())["eos_token_ids"] == [2]


def nothing(_: Path) -> None:
    pass


def template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("other")


def context(directory: Path) -> None:
    edit(directory / "generation_config.json", temperature=0.5)


def tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + " ")


def config(directory: Path) -> None:
    edit(directory / "config.json", rope_theta=20_000.0)


def version(directory: Path) -> None:
    edit(directory / "config.json", transformers_version="9.9", _name_or_path="/x")


def weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = np.fromfile(path, np.uint8)
    data[-1] ^= 1
    data.tofile(path)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (nothing, set[str]()),
        (version, set[str]()),
        (template, {"chat_template"}),
        (tokenizer, {"tokenizer"}),
        (context, {"tokenizer"}),
        (config, {"weights"}),
        (weights, {"weights"}),
    ],
)
def test_a_fingerprint_changes_with_its_part_alone(
    tmp_path: Path, change: Callable[[Path], None], changed: set[str]
) -> None:
    before = SafetensorsCheckpoint(tiny_llama(tmp_path / "a")).fingerprints()
    change(tiny_llama(tmp_path / "b"))
    after = SafetensorsCheckpoint(tmp_path / "b").fingerprints()
    names = ("weights", "tokenizer", "chat_template")
    assert {name for name in names if getattr(before, name) != getattr(after, name)} == changed
    assert all(len(getattr(after, name)) == 16 for name in names)


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    one = SafetensorsCheckpoint(tiny_llama(tmp_path / "one", seed=1)).fingerprints()
    two = SafetensorsCheckpoint(tiny_llama(tmp_path / "two", seed=2)).fingerprints()
    assert one.weights != two.weights
    assert one.tokenizer == two.tokenizer
