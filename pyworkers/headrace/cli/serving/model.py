"""The model of `headrace serve`: fetched once, and what workers will make of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass

from headrace.cli.children.process import supervised
from headrace.cli.console import Printer, StopSignals
from headrace.cli.serving.config import ServeSettings
from headrace.extras import needs
from headrace.settings.values import SettingsError
from headrace.settings.worker import check_context, check_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAs:
    """What workers make of the model, as they will find it themselves."""

    device: str
    dtype: str  # of the weights

    def __str__(self) -> str:
        return f"{self.dtype} on {'the CPU' if self.device == 'cpu' else self.device}"


def fetch(args: argparse.Namespace) -> int:
    """`headrace fetch`: have the model on this machine, and print where it lies; for `serve`, a `ServedAs` as JSON.

    Raises SettingsError and CannotRun.
    """
    check_model(args.model)
    with needs("cpu"):
        from headrace.models import UnsupportedModelError, check_ranks, config, dtype_of_weights
        from headrace.models.load import source
        from headrace.worker.device import choose_device

        for_serve = args.typed == "serve"
        device = choose_device(args.device) if for_serve else "cpu"  # sooner than a download
    try:
        checkpoint = source.resolve(args.model)
        if for_serve:
            check_context(args.context_tokens, checkpoint.config.context_tokens)
            dtype = dtype_of_weights(checkpoint.config, args.dtype, device)
            if args.ep > 1:
                check_ranks(checkpoint.config, args.ep, args.ep_redundant, moves=args.ep_moves)
            print(json.dumps(asdict(ServedAs(device=device, dtype=dtype))))
        else:
            print(checkpoint.path)
    except (config.ModelFileError, UnsupportedModelError) as error:
        raise SettingsError(str(error)) from error
    return 0


async def fetch_model(config: ServeSettings, stop: StopSignals, log: Printer) -> ServedAs | int:
    """Get the model once, before the workers ask for it; what they make of it, or the exit status if that failed.

    A process of its own: it keeps us free of what reading a model imports, and shows its progress
    on our terminal. Its group is its own too, so that the download ends with it.
    """
    log("headrace", f"model: {config.model or 'the default, SmolLM2-135M-Instruct'}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "fetch", "--for=serve"),
        *(f"--device={config.device}", f"--dtype={config.dtype}"),
        *(f"--ep={config.ranks}", f"--ep-redundant={config.redundant}"),
        *(["--ep-moves"] if config.rebalances else []),
        *([] if config.context_tokens is None else [f"--context-tokens={config.context_tokens}"]),
        *([] if config.model is None else ["--", config.model]),
        env=os.environ | supervised(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    ended = asyncio.create_task(process.communicate())
    asked = asyncio.create_task(stop.soon.wait())
    try:
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return 128 + stop.last_signal
        found, _ = ended.result()
        if process.returncode:
            return process.returncode
        return ServedAs(**json.loads(found))
    finally:
        asked.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await ended
