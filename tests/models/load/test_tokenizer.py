"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizer that the metadata came from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from headrace.models.load.default_model import ensure_default_model
from headrace.models.load.doc import ModelDocError
from headrace.models.load.gguf import GgufCheckpoint
from headrace.models.load.gguf_file import GgufFile
from headrace.models.load.tokenizer import gguf_model_files
from helpers.models.tiny_gguf import tiny_gguf
from helpers.models.tiny_model import tiny_llama

TEXTS = [
    "Hello world",
    "The year 2024 and 1,234,567.89",
    "  lead  and trail  ",
    "tab\tnew\n\nline\r\n",
    "naïve café ÀÉÎ 你好世界 日本語 한국어 🎉👩‍👩‍👧 Привет",
    "½ ² ٣٤٥ Ⅷ 五 the  0",
    "<|im_start|>user\nhi<|im_end|>\n<|im_end",
    "don't WE'LL it's",
    "    def f(x):\n        return x**2\n",
    "e\u0301 é \u0000\u0001\u200b\ufeff",
    "",
]


def texts(count: int = 200) -> list[str]:
    """The fixed ones, and random mixtures of letters, digits, whitespace, scripts, emoji and specials."""
    rng = random.Random(0)

    def piece() -> str:
        return rng.choice(
            [
                chr(rng.randrange(32, 127)),
                rng.choice(" 0123456789\n\t"),
                chr(rng.randrange(0xA0, 0x3000)),
                chr(rng.randrange(0x1F300, 0x1F700)),
                "the ",
                "<|im_end|>",
            ]
        )

    return TEXTS + ["".join(piece() for _ in range(rng.randrange(1, 40))) for _ in range(count)]


def test_byte_level_ids_equal_those_of_the_source(tmp_path: Path) -> None:
    tiny = tiny_llama(tmp_path / "tiny")
    source = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    files = GgufCheckpoint(tiny_gguf(tmp_path / "x.gguf", tiny)).model_files()
    built = Tokenizer.from_str(files.tokenizer)
    for text in texts():
        assert built.encode(text).ids == source.encode(text).ids
        assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text
    assert (files.bos_token, files.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab", "Ġ1234", "!'", "s", "Ġ", "Ġx", "Ċ"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "!'", "s", "Ġ", "Ġx", "Ċ"]),
        ("llama-bpe", ["ab", "Ġ", "123", "4", "!'", "s", "Ġ", "Ġx", "Ċ"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "!'", "s", "Ġ", "Ġx", "Ċ"]),
        ("deepseek-v3", ["ab", "Ġ", "123", "4", "!'", "s", "Ġ", "Ġx", "Ċ"]),
        ("deepseek-coder", ["ab", "Ġ", "1", "2", "3", "4", "!'", "s", "Ġ", "Ġx", "Ċ"]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_model_was_trained(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    tiny = tiny_llama(tmp_path / "tiny")
    path = tiny_gguf(tmp_path / "x.gguf", tiny, metadata={"tokenizer.ggml.pre": pre})
    built = Tokenizer.from_str(GgufCheckpoint(path).model_files().tokenizer)
    split = built.pre_tokenizer
    assert split is not None
    assert [piece for piece, _ in split.pre_tokenize_str("ab 1234!'s  x\n")] == pieces


def test_byte_level_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    path = tiny_gguf(tmp_path / "x.gguf", tiny_llama(tmp_path / "tiny"))
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = Tokenizer.from_str(GgufCheckpoint(path).model_files().tokenizer)
    for text in texts():
        assert ours.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.real_model
def test_default_model_gives_the_ids_of_llama_cpp() -> None:
    """`/tokenize` of llama.cpp (xllamacpp 2026.10) for the GGUF file that the default model comes from.

    Not transformers: its GGUF path does not split SmolLM2's digits one by one, as the model's own
    tokenizer.json does, and so differs on "the  0".
    """
    ours = Tokenizer.from_file(str(ensure_default_model() / "tokenizer.json"))
    golden = Path(__file__).parents[2] / "data" / "smollm2_tokens.json"
    for text, ids in json.loads(golden.read_text(encoding="utf-8")):
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


def spm_gguf(path: Path, **values: Any) -> GgufFile:
    """A SentencePiece vocabulary: specials, bytes, letters, and pairs whose scores rank them."""
    letters = ["▁", "a", "b", "c", "h", "e", "l", "o"]
    words = ["he", "ll", "▁he", "▁hell", "o▁", "ab", "bc", "abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    scores = [0.0] * 259 + [-100.0 - i for i in range(len(letters))] + [-float(i) for i in range(8)]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(values.get("scores", scores))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if "add_space_prefix" in values:
        writer.add_add_space_prefix(values["add_space_prefix"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def test_sentencepiece_joins_the_best_score_first_and_falls_back_to_bytes(tmp_path: Path) -> None:
    built = Tokenizer.from_str(gguf_model_files(spm_gguf(tmp_path / "x.gguf")).tokenizer)
    assert built.encode("hello").tokens == ["<s>", "▁hell", "o"]
    assert built.encode("abc", add_special_tokens=False).tokens == ["▁", "abc"]
    assert built.encode("aé", add_special_tokens=False).tokens == ["▁", "a", "<0xC3>", "<0xA9>"]
    for text in ("hello abc", " two  blanks ", "é\n日本", "a"):
        assert built.decode(built.encode(text).ids) == text


def test_sentencepiece_without_prefix_adds_no_blank(tmp_path: Path) -> None:
    file = spm_gguf(tmp_path / "x.gguf", add_space_prefix=False)
    built = Tokenizer.from_str(gguf_model_files(file).tokenizer)
    assert built.encode("abc", add_special_tokens=False).tokens == ["abc"]
    assert built.decode(built.encode(" a").ids) == " a"


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not known; known: gpt2"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre 'default' is not known; known:"),
        ({"tokenizer.ggml.merges": ["q nothere"]}, "'q nothere' does not join two tokens"),
        ({"tokenizer.ggml.merges": ["qq"]}, "'qq' does not join two tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' is there twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type: expected 285 types, found 2"),
        ({"tokenizer.ggml.unknown_token_id": 300}, "unknown_token_id: token 300 of 285 does not"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_named(
    tmp_path: Path, metadata: dict[str, Any], text: str
) -> None:
    path = tiny_gguf(tmp_path / "x.gguf", tiny_llama(tmp_path / "tiny"), metadata=metadata)
    with pytest.raises(ModelDocError) as caught:
        GgufCheckpoint(path).doc()
    assert text in str(caught.value)


def test_bos_is_added_where_the_file_asks(tmp_path: Path) -> None:
    tiny = tiny_llama(tmp_path / "tiny")
    asked = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    path = tiny_gguf(tmp_path / "x.gguf", tiny, metadata=asked)
    built = Tokenizer.from_str(GgufCheckpoint(path).model_files().tokenizer)
    assert built.encode("a").tokens == ["<|im_start|>", "a", "<|im_end|>"]
    assert built.encode("a", add_special_tokens=False).tokens == ["a"]


def test_the_document_of_a_gguf_has_its_tokenizer_and_template(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": "{{ messages }}"}
    path = tiny_gguf(tmp_path / "x.gguf", tiny_llama(tmp_path / "tiny"), metadata=template)
    document = json.loads(GgufCheckpoint(path).doc())
    assert document["chat_template"] == "{{ messages }}"
    assert document["eos_token_ids"] == [2]
    assert Tokenizer.from_str(document["tokenizer"]).get_vocab_size() == document["vocab_size"]
