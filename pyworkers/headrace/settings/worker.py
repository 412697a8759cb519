"""The settings of a worker: the flags of `headrace worker`, most of which `headrace serve` hands to its workers.

The rows that its engine obeys, too, are in `engine.py`.
A worker has more of them than it is told: `step_sizes` fills in what depends on the device.
"""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ContextTooLong
from headrace.settings.engine import CACHE, MODEL, MTP, EngineSettings
from headrace.settings.parallel import PARALLEL, ParallelSettings
from headrace.settings.table import rows, setting, typed, values_of
from headrace.settings.values import (
    FlagError,
    SettingsError,
    count,
    existing_file,
    model_names,
    nonempty,
    port_number,
    positive,
    shortened,
    size_bytes,
)

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
KV_DTYPES = ("auto", "fp8")
DEVICES = ("auto", "cpu", "cuda")
ROLES = ("prefill", "decode", "both")

ROUTER = "Router"
SPLIT = "Split serving"
ENDPOINT = "HTTP endpoint"
LOG = "Log"
TRACES = "Traces"
GROUPS = (MODEL, CACHE, MTP, PARALLEL, ROUTER, SPLIT, ENDPOINT, LOG, TRACES)  # as the help has them
LOOPBACK = "127.0.0.1"


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


def _by_device(field: str) -> str:
    sizes = {device: getattr(SIZES_OF_DEVICE[device], field) for device in ("cpu", "cuda")}
    return f"{sizes['cpu']} on a CPU, {sizes['cuda']} on a GPU"


def split_routers(text: str) -> tuple[str, ...]:
    """Split at commas, but not between the endpoints of an etcd: these end with their `/PREFIX`."""
    specs: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if specs and specs[-1].startswith("etcd:") and "/" not in specs[-1]:
            specs[-1] += f",{part}"
        elif part:
            specs.append(part)
    return tuple(specs)


def unnamed() -> str:
    """Of a worker that nobody named."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _routers(text: str) -> tuple[str, ...]:
    if not (specs := split_routers(text)):
        raise argparse.ArgumentTypeError("it names no address; write HOST:PORT or unix:PATH")
    return specs


def _secret_in(path: str) -> str:
    try:
        secret = Path(path).expanduser().read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise argparse.ArgumentTypeError(f"cannot read {shortened(path)}: {why}") from error
    if not secret:
        raise argparse.ArgumentTypeError(f"{shortened(path)} is empty; write the secret into it")
    return secret


LOG_LEVELS = {  # and what Python calls them
    "error": "ERROR",
    "warn": "WARNING",
    "warning": "WARNING",
    "info": "INFO",
    "debug": "DEBUG",
    "trace": "DEBUG",
    "off": "CRITICAL",
}


def plain_level(text: str) -> str:
    """The level that names no part of the program: `h2=debug` is for the router, which may get the same text."""
    levels = [part.strip().lower() for part in text.split(",") if "=" not in part]
    if wrong := [level for level in levels if level not in LOG_LEVELS]:
        raise argparse.ArgumentTypeError(
            f"{shortened(wrong[0])} is not a level; write one of {', '.join(LOG_LEVELS)}"
        )
    return levels[-1] if levels else "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(EngineSettings, ParallelSettings):
    """What a worker was told to be, and of its engine. None means that the worker chooses."""

    model: str | None = None  # a folder, a .gguf file, a hub id; None is the default model
    served_model_name: str | None = setting(
        "--served-model-name",
        group=MODEL,
        value="NAME",
        read=model_names,
        shown="the model's own name",
        help="Name of the model in requests and in /v1/models. After commas: further names under which it is found and "
        "listed; answers have the first.",
        in_serve=True,
    )
    device: str = setting(
        "--device",
        group=MODEL,
        value="DEVICE",
        choices=DEVICES,
        default="auto",
        help="Where the model is computed. auto is a GPU if there is one, else the CPU.",
        in_serve=True,
    )
    cuda_graphs: bool = setting(
        "--no-cuda-graphs",
        group=MODEL,
        default=True,
        means=False,
        help="On a GPU start the kernels of a decode step one by one, rather than record such steps as CUDA graphs.",
        in_serve=True,
    )
    dtype: str = setting(
        "--dtype",
        group=MODEL,
        value="DTYPE",
        choices=DTYPES,
        default="auto",
        help="Type of the weights. int8 quantises them in groups of 64. auto is int8 on a CPU and the model's own type "
        "on a GPU.",
        in_serve=True,
    )
    kv_dtype: str = setting(
        "--kv-dtype",
        group=CACHE,
        value="DTYPE",
        choices=KV_DTYPES,
        default="auto",
        help="Type of the KV cache. auto is the type of the model's values. fp8 takes half of the memory, and is for "
        "DeepSeek models on GPUs.",
        in_serve=True,
    )
    kv_memory_bytes: int | None = setting(
        "--kv-memory",
        group=CACHE,
        value="SIZE",
        read=size_bytes,
        shown="chosen by the worker from the free memory",
        help="Memory for the KV cache of one worker, in bytes or with a unit, such as 2GiB.",
        in_serve=True,
    )
    block_tokens: int | None = setting(
        "--block-tokens",
        group=CACHE,
        value="TOKENS",
        read=positive,
        shown=_by_device("block_tokens"),
        help="Tokens in one block of the KV cache. All workers of a model need blocks of one size.",
        in_serve=True,
    )
    max_sequences: int | None = setting(
        "--max-sequences",
        also=("--max-num-seqs",),
        group=CACHE,
        value="N",
        read=positive,
        shown=f"{_by_device('max_sequences')}, at most --max-batched-tokens",
        help="Answers that run at once in one worker.",
        in_serve=True,
    )
    max_batched_tokens: int | None = setting(
        "--max-batched-tokens",
        also=("--max-num-batched-tokens",),
        group=CACHE,
        value="TOKENS",
        read=positive,
        shown=f"{_by_device('max_batched_tokens')}, at least --max-sequences",
        help="Tokens in one step, of prompts and answers together.",
        in_serve=True,
    )
    overlap: bool = setting(
        "--no-overlap",
        group=CACHE,
        default=True,
        means=False,
        help="Plan each step after the step before it has ended. Without this flag the plan is made while that step "
        "still runs.",
        in_serve=True,
    )
    routers: tuple[str, ...] = setting(
        "--router",
        group=ROUTER,
        value="ROUTER[,ROUTER]",
        read=_routers,
        default=("127.0.0.1:8001",),
        shown="127.0.0.1:8001",
        help="Routers to join, each as HOST:PORT or unix:PATH. dns:NAME:PORT stands for all addresses of a name, and "
        "etcd:HOST:PORT[,HOST:PORT]/PREFIX for all routers that register there.",
    )
    name: str = setting(
        "--name",
        group=ROUTER,
        value="NAME",
        read=nonempty,
        default_factory=unnamed,
        shown="host name and process id",
        help="Name of this worker. Each worker of a fleet needs its own. The ranks of a group have one, and each adds "
        "its number.",
    )
    secret: str | None = setting(
        "--secret-file",
        group=ROUTER,
        value="FILE",
        read=_secret_in,
        variable="HEADRACE_SECRET",
        help="File with the secret that lets workers join the router. The variable holds the secret itself.",
        in_serve=True,
    )
    router_tls: bool = setting(
        "--router-tls",
        group=ROUTER,
        default=False,
        help="Use TLS on the link to the router.",
    )
    router_ca: Path | None = setting(
        "--router-ca",
        group=ROUTER,
        value="FILE",
        read=existing_file,
        shown="those of the system",
        help="Certificates (PEM) that the router's certificate is checked with. Implies --router-tls.",
    )
    router_client_cert: Path | None = setting(
        "--router-client-cert",
        group=ROUTER,
        value="FILE",
        read=existing_file,
        help="Certificate (PEM) that this worker shows to a router that asks for one. Needs --router-client-key. "
        "Implies --router-tls.",
    )
    router_client_key: Path | None = setting(
        "--router-client-key",
        group=ROUTER,
        value="FILE",
        read=existing_file,
        help="Private key (PEM) of --router-client-cert.",
    )
    role: str = setting(
        "--role",
        group=SPLIT,
        value="ROLE",
        choices=ROLES,
        default="both",
        help="prefill computes prompts for other workers. decode and both take whole requests, and answers whose "
        "prompt a prefill worker computes.",
    )
    transfer_host: str | None = setting(
        "--transfer-host",
        group=SPLIT,
        value="HOST",
        read=nonempty,
        shown="the address from which the router is dialled",
        help="Address of this machine at which other workers fetch KV.",
        in_serve=True,
    )
    transfer: bool = setting(
        "--no-transfer",
        group=SPLIT,
        default=True,
        means=False,
        help="Neither give KV to other workers nor take KV from them.",
    )
    http_port: int | None = setting(
        "--http-port",
        group=ENDPOINT,
        value="PORT",
        read=port_number,
        shown="no endpoint",
        help="Port at which this worker answers /livez, /readyz and /metrics, and /debug/stack and /debug/profile for "
        "processes of its machine. 0 is any that is free; the log has it. Each rank of a machine takes the next one.",
    )
    http_host: str = setting(
        "--http-host",
        group=ENDPOINT,
        value="HOST",
        read=nonempty,
        default=LOOPBACK,
        help="Address of --http-port. Whoever reaches it can read the metrics.",
    )
    log_level: str = setting(
        "--log-level",
        group=LOG,
        value="LEVEL",
        read=plain_level,
        of_variable=plain_level,
        variable="HEADRACE_LOG",
        default="info",
        help="What is logged: error, warn, info, debug or off. A filter of the router is taken, too; the worker obeys "
        "the level in it that names no part of the program.",
        in_serve=True,
    )
    log_format: str = setting(
        "--log-format",
        group=LOG,
        value="FORMAT",
        choices=("text", "json"),
        default="text",
        help="Form of the log: lines of text, or lines of JSON.",
        in_serve=True,
    )
    log_requests_per_s: int = setting(
        "--log-requests-per-s",
        group=LOG,
        value="N",
        read=count,
        default=20,
        help="Lines about requests a second, at most: of requests that finished, and as many of those that failed. "
        "What is left out is counted and told in the line of every ten seconds. 0 writes none. Workers of `headrace "
        "serve` write none: its router does.",
    )
    otlp_endpoint: str | None = setting(
        "--otlp-endpoint",
        group=TRACES,
        value="URL",
        variable="OTEL_EXPORTER_OTLP_ENDPOINT",
        shown="no spans",
        help="Collector of OpenTelemetry to which spans of legs are sent, as OTLP over HTTP: http://HOST:4318, to "
        "which /v1/traces is added. There are spans of the legs whose trace the router keeps. The variable "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT holds a whole URL.",
        in_serve=True,
    )

    @property
    def dials_tls(self) -> bool:
        """Whether the links to routers are encrypted."""
        files = (self.router_ca, self.router_client_cert)
        return self.router_tls or any(file is not None for file in files)


WORKER_FLAGS = dict(
    sorted(
        rows(WorkerSettings).items(),
        key=lambda row: (GROUPS.index(row[1].group), row[0] in rows(EngineSettings)),
    )
)


def worker_settings(args: argparse.Namespace) -> WorkerSettings:
    """Checked settings of `headrace worker`, or of the workers of `headrace serve`. Raises FlagError."""
    check_model(args.model)
    settings = WorkerSettings(model=args.model, **values_of(WorkerSettings, args))
    batched, sequences = settings.max_batched_tokens, settings.max_sequences
    if batched is not None and sequences is not None and batched < sequences:
        raise FlagError(
            f"--max-batched-tokens {batched} is less than --max-sequences {sequences}: each running answer takes one "
            "token of every step; raise the first or lower the second"
        )
    if settings.mtp == 0 and settings.mtp_fixed:
        raise FlagError("--mtp-fixed needs --mtp TOKENS, which says how many tokens to draft")
    if (settings.router_client_cert is None) != (settings.router_client_key is None):
        given = "cert" if settings.router_client_key is None else "key"
        lacks = "key" if given == "cert" else "cert"
        raise FlagError(
            f"--router-client-{given} needs --router-client-{lacks}: a certificate and its key go together"
        )
    if settings.http_port is None and settings.http_host != LOOPBACK:
        raise FlagError("--http-host needs --http-port, which says where to listen there")
    if not settings.transfer and settings.role == "prefill":
        raise FlagError(
            "--no-transfer leaves --role prefill nothing to do: leave one of the two flags out"
        )
    return settings


def worker_argv(args: argparse.Namespace) -> list[str]:
    """What `serve` was told for its workers, as the command line of one."""
    handed_on = [flag for flag in WORKER_FLAGS.values() if flag.in_serve]
    return [*([] if args.model is None else [args.model]), *typed(args).argv(handed_on)]


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


def check_model(model: str | None) -> None:
    """Raise SettingsError if `model` is meant as a path and nothing usable is there."""
    if model is None:
        return
    path = Path(model).expanduser()
    shown = shortened(model)[1:-1] if len(model) > 80 else model
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise SettingsError(f"{shown} cannot be a model: {error.__class__.__name__}") from error
    if is_folder:
        if not (path / "config.json").is_file():
            raise SettingsError(f"{shown} holds no config.json, so it is not a model folder")
    elif is_file:
        if path.suffix != ".gguf":
            raise SettingsError(f"{shown} is a file, but its name does not end in .gguf")
    elif model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        raise SettingsError(f"there is no model at {shown}")


def check_context(typed: int | None, longest: int) -> None:
    """Raise `ContextTooLong` where somebody typed a longer context than the positions of the model allow."""
    if typed is not None and typed > longest:
        raise ContextTooLong(typed, longest, "this model allows", "leave the flag out")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The one argument that is not a flag: of `serve` and of `worker`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A folder with config.json and safetensors, a .gguf file, or a hub id. smollm2-r1 and smollm2-r1-paired "
        "are the default model in the form of DeepSeek-V3. [default: SmolLM2-135M-Instruct]",
    )
