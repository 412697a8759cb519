"""Learn the merges of the mock workers' tokenizer, so that text gets about as many tokens as from a real one.

python -m bench.presets.tokenizer FILE.jsonl.gz... > bench/src/mock/model/merges.txt

The committed ones come from mlcommons/endpoints agentic_coding (Apache-2.0, commit ea332753), sierra-research/tau-bench
airline trajectories (MIT, 59a200c) and GSM8K (MIT). Single bytes and special tokens are not in the file: `mock::model`
puts them in front.
"""

import gzip
import json
import sys
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

VOCABULARY = 4096
SPECIAL = 4
# as in tests/data/tokenizer_byte_level.json
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(value: object) -> Iterator[str]:
    """All strings inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        yield from texts(list(value.values()))


def lines(paths: list[str]) -> Iterator[str]:
    for path in paths:
        with gzip.open(path, "rt") as file:
            for line in file:
                yield from texts(json.loads(line))


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_as_letters])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(sys.argv[1:]), trainer)
    for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
        print(left, right)


if __name__ == "__main__":
    main()
