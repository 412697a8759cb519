"""Flags that several commands share, and the checked settings that come out of them.

Nothing here imports torch: `headrace --help` answers at once.
"""

import argparse
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ContextTooLong

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
KV_DTYPES = ("auto", "fp8")
DEVICES = ("auto", "cpu", "cuda")
ROLES = ("prefill", "decode", "both")
MTP_VERIFY = ("noise", "rejection")
MOST_MTP = 3

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class SettingsError(ValueError):
    """A setting cannot be right. The text is one line, for the person who typed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker was asked to be. None means that the worker chooses."""

    model: str | None  # a folder, a .gguf file, a hub id; None is the default model
    name: str
    routers: tuple[
        str, ...
    ]  # HOST:PORT, unix:PATH, dns:NAME:PORT, etcd:HOST:PORT[,HOST:PORT]/PREFIX
    served_model_name: str | None
    device: str
    dtype: str
    kv_memory_bytes: int | None
    context_tokens: int | None
    block_tokens: int | None
    max_sequences: int | None
    max_batched_tokens: int | None
    max_waiting: int
    prefix_cache: bool
    secret: str | None
    router_ca: Path | None
    router_tls: bool
    log_level: str
    kv_dtype: str = "auto"
    role: str = "both"
    transfer: bool = True  # KV may come from other workers and go to them
    transfer_host: str | None = None  # where those reach this one; None is the router link's own
    mtp: int = 0  # tokens drafted ahead by the model's own layer; 0 is off
    mtp_verify: str = "noise"
    mtp_fixed: bool = False
    overlap: bool = True  # a step is planned while the one before it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """How a worker cuts its work. All are counts of what the name says."""

    block_tokens: int
    max_sequences: int
    max_batched_tokens: int


# A chunk of a GPU's size amortises reading the weights; a CPU is at its arithmetic from some hundred rows on, and
# answers wait for the prompt rows beside them. Those of GPUs are guesses, not tuned on one yet.
SIZES_OF_DEVICE = {
    "cpu": StepSizes(block_tokens=16, max_sequences=64, max_batched_tokens=256),
    "cuda": StepSizes(block_tokens=64, max_sequences=512, max_batched_tokens=8192),
}


def step_sizes(settings: WorkerSettings, device_type: str) -> StepSizes:
    """What was typed, and the defaults of "cpu" or "cuda" for the rest, which give way where the two contradict."""
    default = SIZES_OF_DEVICE[device_type]
    sequences = settings.max_sequences
    batched = settings.max_batched_tokens
    if sequences is None:
        sequences = min(default.max_sequences, batched or default.max_batched_tokens)
    return StepSizes(
        block_tokens=settings.block_tokens or default.block_tokens,
        max_sequences=sequences,
        max_batched_tokens=batched or max(default.max_batched_tokens, sequences),
    )


def _by_device(name: str) -> str:
    sizes = {device: getattr(SIZES_OF_DEVICE[device], name) for device in ("cpu", "cuda")}
    return f"{sizes['cpu']} on a CPU, {sizes['cuda']} on a GPU"


def size_bytes(text: str) -> int:
    """`512M`, `1.5GiB` or plain bytes. Units are powers of 1024."""
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE | re.ASCII
    )
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512M or 1.5GiB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size == 0:
        raise argparse.ArgumentTypeError("a size of 0 leaves no room for anything")
    return size


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def duration(text: str) -> float:
    """Seconds of `30s`, `2m`, `500ms` or plain seconds, at most an hour."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 30s, 2m or 500ms")
    value = float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2] or "s"]
    if value > 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is more than an hour")
    return value


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def port_number(text: str) -> int:
    """0 (take a free one) to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; write 0 to 65535")
    return int(text)


def check_model(model: str | None) -> None:
    """Raise SettingsError if `model` is meant as a path and nothing usable is there."""
    if model is None:
        return
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SettingsError(f"{model} holds no config.json, so it is no model folder")
    elif path.is_file():
        if path.suffix != ".gguf":
            raise SettingsError(f"{model} is a file, but its name does not end in .gguf")
    elif model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        raise SettingsError(f"there is no model at {model}")


def check_context(typed: int | None, longest: int) -> None:
    """Raise `ContextTooLong` where somebody typed a longer context than the positions of the model allow."""
    if typed is not None and typed > longest:
        raise ContextTooLong(typed, longest, "this model allows", "leave the flag out")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and how it is computed: for `serve` and for `worker`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder with config.json and safetensors, a .gguf file, or a hub id; left out: "
        "the default model, SmolLM2-135M-Instruct; smollm2-r1 and smollm2-r1-paired are that one as DeepSeek-V3",
    )
    group = parser.add_argument_group("Model")
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name under which clients ask for the model (default: the model's own)",
    )
    group.add_argument(
        "--device", choices=DEVICES, default="auto", help="where to compute (default: %(default)s)"
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of the weights; int8 quantises them in groups of 64 (default: %(default)s)",
    )
    group.add_argument(
        "--context-tokens",
        "--max-model-len",
        type=positive,
        metavar="N",
        help="longest prompt and answer together (default: the model's own limit)",
    )
    group = parser.add_argument_group("Cache and batch")
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="of the KV cache: that of the values, or fp8, which takes half of it; fp8 is for DeepSeek models on GPUs "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--kv-memory",
        type=size_bytes,
        metavar="SIZE",
        help="memory for the KV cache of one worker, such as 2GiB (default: chosen by the worker)",
    )
    group.add_argument(
        "--block-tokens",
        type=positive,
        metavar="N",
        help="tokens in one block of the KV cache; the workers of a model agree on it "
        f"(default: {_by_device('block_tokens')})",
    )
    group.add_argument(
        "--max-sequences",
        "--max-num-seqs",
        type=positive,
        metavar="N",
        help="answers that run at once in one worker "
        f"(default: {_by_device('max_sequences')}, at most --max-batched-tokens)",
    )
    group.add_argument(
        "--max-batched-tokens",
        "--max-num-batched-tokens",
        type=positive,
        metavar="N",
        help="tokens in one step, prompts and answers together "
        f"(default: {_by_device('max_batched_tokens')}, at least --max-sequences)",
    )
    group.add_argument(
        "--max-waiting",
        type=positive,
        default=1024,
        metavar="N",
        help="requests that may wait inside one worker (default: %(default)s)",
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its beginning"
    )
    group.add_argument(
        "--no-overlap",
        action="store_true",
        help="plan each step when the one before it has ended, not shortly before that",
    )
    group = parser.add_argument_group("Multi-token prediction")
    group.add_argument(
        "--mtp",
        type=count,
        default=0,
        metavar="K",
        help=f"let the model draft up to K tokens ahead, at most {MOST_MTP}, fewer or none where that does not pay; it "
        "needs a model with a layer for it (default: 0, off)",
    )
    group.add_argument(
        "--mtp-verify",
        choices=MTP_VERIFY,
        default="noise",
        help="which drafts count: those that equal what is sampled without them, so that text never changes (noise); "
        "or more of them, such that only the distribution does not change (rejection) (default: %(default)s)",
    )
    group.add_argument(
        "--mtp-fixed",
        action="store_true",
        help="always draft K tokens, also where that does not pay: to compare",
    )


def check_model_arguments(args: argparse.Namespace) -> None:
    """Raise SettingsError for what `add_model_arguments` took and a worker cannot be."""
    check_model(args.model)
    batched: int | None = args.max_batched_tokens
    sequences: int | None = args.max_sequences
    if batched is not None and sequences is not None and batched < sequences:
        raise SettingsError(
            f"--max-batched-tokens {batched} is less than --max-sequences "
            f"{sequences}: each running answer takes one token of every step"
        )
    if args.mtp > MOST_MTP:
        raise SettingsError(
            f"--mtp {args.mtp} is too many: at most {MOST_MTP} tokens are drafted ahead"
        )
    if args.mtp == 0 and args.mtp_fixed:
        raise SettingsError("--mtp-fixed: of how many tokens? add --mtp K")


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """How a worker finds its routers: for `worker` alone."""
    group = parser.add_argument_group("Router")
    group.add_argument(
        "--router",
        default="127.0.0.1:8001",
        metavar="ROUTER[,ROUTER]",
        help="HOST:PORT or unix:PATH of a router; dns:NAME:PORT for all addresses of a name; "
        "etcd:HOST:PORT[,HOST:PORT]/PREFIX for all that register there (default: %(default)s)",
    )
    group.add_argument(
        "--name", metavar="NAME", help="unique in the fleet (default: host name and process id)"
    )
    group.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="file with the secret that lets workers join (or set HEADRACE_SECRET)",
    )
    group.add_argument("--router-tls", action="store_true", help="dial the router with TLS")
    group.add_argument(
        "--router-ca",
        type=Path,
        metavar="FILE",
        help="certificates (PEM) to trust instead of the system's; implies --router-tls",
    )
    group = parser.add_argument_group("Split serving")
    group.add_argument(
        "--role",
        choices=ROLES,
        default="both",
        help="prefill computes prompts for others; decode and both take whole requests, and answers whose prompt a "
        "prefill worker computes (default: %(default)s)",
    )
    group.add_argument(
        "--transfer-host",
        metavar="HOST",
        help="address of this machine where other workers fetch KV (default: the one from which the router is dialled)",
    )
    group.add_argument(
        "--no-transfer",
        action="store_true",
        help="neither give KV to other workers nor take it from them",
    )
    group = parser.add_argument_group("Log")
    group.add_argument(
        "--log-level",
        choices=("error", "warn", "info", "debug"),
        default="info",
        help="(default: %(default)s)",
    )


def worker_settings(args: argparse.Namespace) -> WorkerSettings:
    """Checked settings of `headrace worker`. Raises SettingsError."""
    check_model_arguments(args)
    routers = split_routers(args.router)
    if not routers:
        raise SettingsError("--router names no address")
    if args.no_transfer and args.role == "prefill":
        raise SettingsError("--no-transfer leaves --role prefill nothing to do")
    return WorkerSettings(
        model=args.model,
        name=args.name or f"{socket.gethostname()}-{os.getpid()}",
        routers=routers,
        served_model_name=args.served_model_name,
        device=args.device,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        kv_memory_bytes=args.kv_memory,
        context_tokens=args.context_tokens,
        block_tokens=args.block_tokens,
        max_sequences=args.max_sequences,
        max_batched_tokens=args.max_batched_tokens,
        max_waiting=args.max_waiting,
        prefix_cache=not args.no_prefix_cache,
        secret=_secret(args.secret_file),
        router_ca=args.router_ca,
        router_tls=args.router_tls or args.router_ca is not None,
        log_level=args.log_level,
        role=args.role,
        transfer=not args.no_transfer,
        transfer_host=args.transfer_host,
        mtp=args.mtp,
        mtp_verify=args.mtp_verify,
        mtp_fixed=args.mtp_fixed,
        overlap=not args.no_overlap,
    )


def split_routers(text: str) -> tuple[str, ...]:
    """Split at commas, but not between the endpoints of an etcd: these end with their `/PREFIX`."""
    specs: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if specs and specs[-1].startswith("etcd:") and "/" not in specs[-1]:
            specs[-1] += f",{part}"
        elif part:
            specs.append(part)
    return tuple(specs)


def _secret(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("HEADRACE_SECRET") or None
    try:
        return path.read_text().rstrip("\r\n")
    except OSError as error:
        raise SettingsError(f"--secret-file: cannot read {path}: {error.strerror}") from error


def model_argv(args: argparse.Namespace) -> list[str]:
    """The arguments of `add_model_arguments` as a command line for a worker."""
    argv = [] if args.model is None else [args.model]
    for name in (
        "served_model_name",
        "device",
        "dtype",
        "kv_dtype",
        "context_tokens",
        "kv_memory",
        "block_tokens",
        "max_sequences",
        "max_batched_tokens",
        "max_waiting",
        "mtp",
        "mtp_verify",
    ):
        value = getattr(args, name)
        if value is not None:
            argv.append(f"--{name.replace('_', '-')}={value}")
    if args.no_prefix_cache:
        argv.append("--no-prefix-cache")
    if args.no_overlap:
        argv.append("--no-overlap")
    if args.mtp_fixed:
        argv.append("--mtp-fixed")
    return argv
