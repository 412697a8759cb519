"""tokenizer.json from the tokenizer metadata of a GGUF file.

GGUF keeps tokens, merges or scores, and the *name* of the pre-tokenizer; the regular expressions behind a
name come from the tokenizer.json files of the models. A name that is not here is an error: a wrong split
gives text that is merely worse, which nobody would notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.models.load.doc import ModelDocError, ModelFiles
from headrace.models.load.gguf_file import GgufFile

__all__ = ["gguf_model_files"]

JSON = dict[str, Any]

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_BYTE_LEVEL: JSON = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2: JSON = _BYTE_LEVEL | {"use_regex": True}
_BYTES_ONLY: JSON = _BYTE_LEVEL | {"use_regex": False}
_DIGITS: JSON = {"type": "Digits", "individual_digits": True}


def _split(regex: str) -> JSON:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> JSON:
    """The split of GPT-4 and its heirs, which differ in how many digits stay together."""
    return _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = (_words(r"\p{N}{1,3}"), _BYTES_ONLY)
_QWEN2 = (_words(r"\p{N}"), _BYTES_ONLY)
_SMOLLM = (_DIGITS, _GPT2)
_DEEPSEEK_V3 = (
    _split(r"\p{N}{1,3}"),
    _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    _split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
    _BYTES_ONLY,
)
_DEEPSEEK_CODER = (
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
    _DIGITS,
    _BYTES_ONLY,
)

# tokenizer.ggml.pre -> pre-tokenizers, in order
_PRE_TOKENIZERS: dict[str, Sequence[JSON]] = {
    "gpt-2": (_GPT2,),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-coder": _DEEPSEEK_CODER,
}
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # their text is put into Unicode NFC first
_WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
)  # a word that is a token is taken before any merge


def gguf_model_files(file: GgufFile) -> ModelFiles:
    """Tokenizer, template and special tokens of a GGUF file; `ModelDocError` where it cannot be told."""
    kind = file.require("tokenizer.ggml.model", str)
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelDocError(f"{file.path}: tokenizer.ggml.tokens: expected tokens, found none")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelDocError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not known; known: gpt2, llama"
        )

    def special(key: str) -> str | None:
        token = _token_id(file, key, tokens)
        return None if token is None else tokens[token]

    return ModelFiles(
        tokenizer=json.dumps(tokenizer, ensure_ascii=False),
        chat_template=file.get("tokenizer.chat_template", str),
        bos_token=special("bos_token_id"),
        eos_token=special("eos_token_id"),
        pad_token=special("padding_token_id"),
        unk_token=special("unknown_token_id"),
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> JSON:
    pre = file.require("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise ModelDocError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not known; "
            f"known: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    steps = _PRE_TOKENIZERS[pre]
    vocab = _vocab(file, tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": steps[0]
        if len(steps) == 1
        else {"type": "Sequence", "pretokenizers": list(steps)},
        "post_processor": _begin_and_end(file, tokens, add_bos=pre in _WHOLE_WORDS),
        "decoder": _GPT2,
        "model": _bpe(vocab, _merges(file, vocab), ignore_merges=pre in _WHOLE_WORDS),
    }


def _sentencepiece(file: GgufFile, tokens: list[str]) -> JSON:
    """SentencePiece BPE as Hugging Face writes it for Llama 2: merges ranked by score, bytes as fallback."""
    vocab = _vocab(file, tokens)
    scores = file.get("tokenizer.ggml.scores", list)
    if scores is None or len(scores) != len(tokens):
        found = "none" if scores is None else str(len(scores))
        raise ModelDocError(
            f"{file.path}: tokenizer.ggml.scores: expected {len(tokens)} scores, found {found}"
        )
    unknown = _token_id(file, "unknown_token_id", tokens)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool)
    replace: JSON = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend: JSON = {"type": "Prepend", "prepend": "▁"}
    decode: list[JSON] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix is not False:
        decode.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(vocab, _ranked_merges(vocab, scores), ignore_merges=False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": replace
        if prefix is False
        else {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": _begin_and_end(file, tokens, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decode},
        "model": model
        | {
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], *, ignore_merges: bool) -> JSON:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _vocab(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ModelDocError(f"{file.path}: tokenizer.ggml.tokens: {twice!r} is there twice")
    return vocab


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[list[str]]:
    merges = file.strings("tokenizer.ggml.merges")
    if merges is None:
        raise ModelDocError(f"{file.path}: tokenizer.ggml.merges: the key is missing")
    pairs: list[list[str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelDocError(
                f"{file.path}: tokenizer.ggml.merges: {merge!r} does not join two tokens into a third"
            )
        pairs.append([left, right])
    return pairs


def _ranked_merges(vocab: dict[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Every way to put a token together from two others, best token first.

    SentencePiece joins the pair whose result has the best score; a list of pairs in that order is the same.
    """
    ranked: list[tuple[float, int, int, list[str]]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right, [token[:cut], token[cut:]]))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[JSON]:
    """Tokens that are found in the text as they are, before it is split; control tokens are special."""
    types = file.get("tokenizer.ggml.token_type", list) or []
    if types and len(types) != len(tokens):
        raise ModelDocError(
            f"{file.path}: tokenizer.ggml.token_type: expected {len(tokens)} types, found {len(types)}"
        )
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]


def _begin_and_end(file: GgufFile, tokens: list[str], *, add_bos: bool) -> JSON | None:
    """A post-processor that adds bos and eos where the file, or its kind by default, asks for it."""
    asked = file.get("tokenizer.ggml.add_bos_token", bool)
    begin = (
        _token_id(file, "bos_token_id", tokens) if (add_bos if asked is None else asked) else None
    )
    ends = file.get("tokenizer.ggml.add_eos_token", bool)
    end = _token_id(file, "eos_token_id", tokens) if ends else None
    if begin is None and end is None:
        return None

    def around(pieces: Iterable[str]) -> list[JSON]:
        found: list[JSON] = []
        for type_id, piece in enumerate(pieces):
            if begin is not None:
                found.append({"SpecialToken": {"id": tokens[begin], "type_id": type_id}})
            found.append({"Sequence": {"id": piece, "type_id": type_id}})
            if end is not None:
                found.append({"SpecialToken": {"id": tokens[end], "type_id": type_id}})
        return found

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("AB"),
        "special_tokens": {
            tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
            for token in (begin, end)
            if token is not None
        },
    }


def _token_id(file: GgufFile, key: str, tokens: list[str]) -> int | None:
    token = file.get(f"tokenizer.ggml.{key}", int)
    if token is not None and token >= len(tokens):
        raise ModelDocError(
            f"{file.path}: tokenizer.ggml.{key}: token {token} of {len(tokens)} does not exist"
        )
    return token
