"""Train a head that drafts tokens ahead (MTP, as in DeepSeek-V3) for a Llama: `python -m headrace.train_mtp`.

Three stages, each of which goes on where it stopped: the model writes answers to thousands of prompts and what it
thought is kept, the head learns to foresee it, and acceptance is measured on held-out prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from headrace.errors import MissingExtra

try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"headrace.train_mtp: {MissingExtra('torch', 'worker', 'training')}")

from safetensors import SafetensorError

from headrace.models.config import ModelFileError
from headrace.models.load.checkpoint import Checkpoint
from headrace.models.load.source import resolve
from headrace.mtp_training.acceptance import by_group, measure
from headrace.mtp_training.batches import Vocabulary, frequent_tokens
from headrace.mtp_training.corpus import SEQUENCES, TEMPERATURES, Corpus, Mix, write_and_read
from headrace.mtp_training.head_file import read_head, save_head
from headrace.mtp_training.loop import TrainSettings, train
from headrace.mtp_training.prompts import Kind, PromptFileError, read_prompts
from headrace.mtp_training.report import Bar, machine, plot, rounded
from headrace.mtp_training.start import fit, fresh_head
from headrace.mtp_training.writer import Writer
from headrace_kernels.upload import tensor_of

EXAMPLES = """\
examples:
  python -m headrace.train_mtp --out mtp                              the default model; some hours of one core
  python -m headrace.train_mtp --out mtp --files 0-7 --epochs 4       a first try
  python -m headrace.train_mtp --out mtp --chat 0.2:questions.jsonl.gz --prose 0.1:texts.txt

OUT holds corpus/ and held-out/ (text with hidden states), state.pt (delete it to train anew), mtp.safetensors, mtp.json
and mtp.png. Run it again to go on after an interruption: on one machine the result is the same, bit for bit.
"""
SAVE_EVERY = 25  # steps
HELD_OUT_TEMPERATURES = (0.0, 0.7)
KINDS: dict[Kind, str] = {"chat": "questions", "prose": "texts to be continued"}
ABOVE_ZERO = (
    "answer_tokens",
    "prompt_tokens",
    "ffn",
    "draft_vocabulary",
    "drafts",
    "epochs",
    "batch_rows",
    "learning_rate",
    "threads",
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m headrace.train_mtp",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = TrainSettings()
    add = made.add_argument
    add("--out", type=Path, required=True, help="folder of all that is kept and made")
    add("--model", help="a model folder, GGUF file or name; the default model otherwise")

    text = made.add_argument_group("text").add_argument
    dtypes = ("float32", "bfloat16", "float16", "int8")
    what = "weights that write the text: those that will serve (default: int8, as CPU workers do)"
    text("--dtype", default="int8", choices=dtypes, help=what)
    what = f"numbers of the files to write and to train on, each of {SEQUENCES} answers (0-31)"
    text("--files", type=numbers, default=range(32), metavar="A-B,C-D", help=what)
    text(
        "--held-out-files",
        type=numbers,
        default=range(3),
        metavar="A-B",
        help="to measure on (0-2)",
    )
    what = (
        "write text and stop: so can several processes write parts of a corpus, each its own files"
    )
    text("--only-write", action="store_true", help=what)
    text("--answer-tokens", type=int, default=256, help="of the longest answer (256)")
    text("--prompt-tokens", type=int, default=192, help="of the longest prompt (192)")
    for prefix, use in (("", "train"), ("held-out-", "measure")):
        for kind, items in KINDS.items():
            text(
                f"--{prefix}{kind}",
                action="append",
                default=[],
                dest="held_out_mixes" if prefix else "mixes",
                type=partial(mix, kind=kind),
                metavar="SHARE[@FROM-TO]:FILE",
                help=f"{use} with SHARE (0 to 1) of the prompts from {items} in FILE, those numbered FROM to TO - 1; "
                ".txt with blank lines between them or .jsonl, .gz or not; may be given several times",
            )
    learning = made.add_argument_group("training").add_argument
    learning("--start", type=Path, help="a head file to train on, in place of a fresh head")
    learning("--ffn", type=int, default=1024, help="neurons of the head (1024)")
    what = "how many tokens can be drafted, the most frequent ones (8192)"
    learning("--draft-vocabulary", type=int, default=8192, help=what)
    learning("--drafts", type=int, default=default.passes, help="in a row (%(default)s)")
    learning("--epochs", type=float, default=default.epochs, help="(%(default)s)")
    learning("--batch-rows", type=int, default=default.batch_rows, help="(%(default)s)")
    learning("--learning-rate", type=float, default=default.learning_rate, help="(%(default)s)")
    what = "of the distance to the model's own hidden states in the loss (%(default)s)"
    learning("--hidden-weight", type=float, default=default.hidden_weight, help=what)
    learning("--seed", type=int, default=0, help="of prompts and of the order of batches (0)")
    learning("--threads", type=int, default=1, help="(1)")
    learning("--device", default="auto", help="cpu, cuda; default: CUDA if there is any")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 (named error), 2 (wrong arguments), 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    made = parser()
    args = made.parse_args(argv)
    for name in ABOVE_ZERO:
        if not getattr(args, name) > 0:
            flag = name.replace("_", "-")
            made.error(f"--{flag} is {getattr(args, name)}, it must be above 0")
    if not args.hidden_weight >= 0:
        made.error(f"--hidden-weight is {args.hidden_weight}, it must be at least 0")
    try:
        run(args, shlex.join(["python", "-m", "headrace.train_mtp", *argv]))
    except (ModelFileError, ValueError, OSError, SafetensorError) as error:
        print(f"train_mtp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_mtp: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace, command: str) -> None:
    torch.set_num_threads(args.threads)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = resolve(args.model)
    vocab_size = checkpoint.config.vocab_size
    training = corpus(args, checkpoint, held_out=False)
    held_out = corpus(args, checkpoint, held_out=True)
    if args.only_write:
        return
    most = min(args.draft_vocabulary, vocab_size)
    vocabulary = frequent_tokens(training.sequences, vocab_size, most)
    settings = TrainSettings(
        epochs=args.epochs,
        batch_rows=args.batch_rows,
        learning_rate=args.learning_rate,
        passes=args.drafts,
        hidden_weight=args.hidden_weight,
        seed=args.seed,
    )
    data_digest = training.digest
    if args.start is None:
        head = fresh_head(checkpoint, args.ffn).to(device)
    else:
        head = read_head(args.start, checkpoint)[0].to(device)
        data_digest += hashlib.sha256(args.start.read_bytes()).hexdigest()[:16]
    embedding, draft_head = frozen(checkpoint, vocabulary, device)
    parameters = sum(p.numel() for p in head.parameters())
    print(
        f"{parameters / 1e6:.2f} M parameters on {device}, {training.tokens} tokens in "
        f"{len(training.sequences)} sequences"
    )
    began_s = time.monotonic()
    state_path = args.out / "state.pt"
    if args.start is None and not state_path.exists():
        fit(head, embedding, training.sequences, vocabulary, Bar("least squares"))
    curve = train(
        head,
        embedding,
        draft_head.to(torch.bfloat16),
        training.sequences,
        vocabulary,
        settings,
        state_path,
        data_digest=data_digest,
        save_every=SAVE_EVERY,
        progress=Bar("training").step,
    )
    took_s = time.monotonic() - began_s
    path = args.out / "mtp.safetensors"
    origin = {
        "mtp_hidden_state": "normed",
        "mtp_chain_hidden_state": "normed",
        "base_model": checkpoint.name,
        "base_weights": checkpoint.fingerprints().weights,
        "training_data": training.digest,
        "training_tokens": str(training.tokens),
        "epochs": str(settings.epochs),
        "steps": str(curve[-1].step),
        "seed": str(settings.seed),
    }
    save_head(path, head, vocabulary.ids, origin)
    # Measured is what was written: fp16, as it will be read.
    head, ids = read_head(path, checkpoint)
    vocabulary = Vocabulary.of(ids, vocab_size)
    embedding, draft_head = frozen(checkpoint, vocabulary, "cpu")
    acceptance = by_group(
        lambda some: measure(head, embedding, draft_head, some, vocabulary, drafts=args.drafts),
        held_out.sequences,
    )
    report = {
        "machine": machine(device),
        "command": command,
        "head": {
            "bytes": path.stat().st_size,
            "parameters": parameters,
            "draft_vocabulary": len(ids),
            **origin,
        },
        "settings": asdict(settings),
        "seconds_of_training_since_the_last_start": took_s,
        "held_out_tokens": held_out.tokens,
        "acceptance": {name: asdict(found) for name, found in acceptance.items()},
        "curve": [asdict(point) for point in curve],
    }
    text = json.dumps(rounded(report), indent=1)
    (args.out / "mtp.json").write_text(text + "\n")
    plot(curve, args.out / "mtp.png")
    for name, found in acceptance.items():
        shares = ", ".join(f"{share:.1%}" for share in found.by_position)
        print(f"{name}: accepted by position {shares}; tokens a forward {found.tokens_per_forward}")


def corpus(args: argparse.Namespace, checkpoint: Checkpoint, *, held_out: bool) -> Corpus:
    """What the model wrote, here and now as far as it is not there yet."""
    name = "held-out" if held_out else "corpus"
    return write_and_read(
        args.out / name,
        lambda: Writer(
            checkpoint,
            dtype=args.dtype,
            lanes=32,
            most_tokens=args.prompt_tokens + args.answer_tokens,
            answer_tokens=args.answer_tokens,
        ),
        split="held-out" if held_out else "training",
        seed=args.seed,
        mixes=args.held_out_mixes if held_out else args.mixes,
        shards=args.held_out_files if held_out else args.files,
        temperatures=HELD_OUT_TEMPERATURES if held_out else TEMPERATURES,
        origin={
            "weights": checkpoint.fingerprints().weights,
            "dtype": args.dtype,
            "answer_tokens": args.answer_tokens,
            "prompt_tokens": args.prompt_tokens,
        },
        progress=Bar(f"writing {name}"),
    )


def numbers(text: str) -> list[int]:
    """`0-3,7` as numbers. For argparse."""
    found: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if span is None:
            raise argparse.ArgumentTypeError(f"{text}: expected numbers like 0-31 or 0-3,7")
        found |= set(range(int(span[1]), int(span[2] or span[1]) + 1))
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: names no number")
    return sorted(found)


_MIX = re.compile(r"(?P<share>\d*\.?\d+)(@(?P<first>\d+)-(?P<end>\d+))?:(?P<path>.+)")


def mix(text: str, kind: Kind) -> Mix:
    """What an argument names. For argparse."""
    found = _MIX.fullmatch(text)
    if found is None or not 0 < (share := float(found["share"])) <= 1:
        raise argparse.ArgumentTypeError(
            f"{text}: expected SHARE[@FROM-TO]:FILE with a share above 0, at most 1"
        )
    try:
        prompts = read_prompts(Path(found["path"]), kind)
    except PromptFileError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found["first"]:
        prompts = prompts[int(found["first"]) : int(found["end"])]
    if not prompts:
        raise argparse.ArgumentTypeError(f"{text}: no prompt has such a number")
    return Mix(share, prompts)


def frozen(
    checkpoint: Checkpoint, vocabulary: Vocabulary, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's embedding, and its head for the tokens that can be drafted."""
    embedding = tensor_of(checkpoint.tensor("model.embed_tokens.weight")).float()
    tied = checkpoint.config.tie_word_embeddings
    head = embedding if tied else tensor_of(checkpoint.tensor("lm_head.weight")).float()
    return embedding.to(device), head[torch.from_numpy(vocabulary.ids).long()].to(device)


if __name__ == "__main__":
    sys.exit(main())
