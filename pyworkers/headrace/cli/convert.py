"""`headrace convert`: a llama model, re-expressed as another family, in a folder of its own."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.extras import needs
from headrace.settings.values import SettingsError
from headrace.settings.worker import check_model

if TYPE_CHECKING:
    from headrace.models.r1_demo.deepseek_folder import Conversion

SPARE_BYTES = 64 << 20  # for tokenizer and configuration


def run(args: argparse.Namespace) -> int:
    """Convert, and print the new folder. Raises SettingsError and MissingExtra; then nothing was left behind."""
    check_model(args.model)
    out = Path(args.out).expanduser()
    if out.exists() or out.is_symlink():
        raise SettingsError(f"--out {out} exists already; nothing is overwritten")
    with needs("cpu"):
        from headrace.models import config
        from headrace.models.load import default_model, source
        from headrace.models.r1_demo import smollm2_r1
        from headrace.models.r1_demo.deepseek_folder import plan
    head = None if args.mtp_head is None else Path(args.mtp_head).expanduser()
    if args.mtp:
        if args.model not in default_model.NAMES:
            raise SettingsError(
                f"--mtp: the head that comes with headrace is for {default_model.NAMES[0]}; "
                "name one for this model with --mtp-head FILE"
            )
        head = smollm2_r1.SMOLLM2_HEAD
    try:
        conversion = plan(source.resolve(args.model), paired=args.paired, head=head)
        write(conversion, out)
    except config.ModelFileError as error:
        raise SettingsError(str(error)) from error
    except OSError as error:
        raise SettingsError(
            f"--out {out}: {error.strerror or error}; nothing was left there"
        ) from error
    print(out)
    return 0


def write(conversion: Conversion, out: Path) -> None:
    """Make `out` beside its place and move it there when it is complete."""
    from headrace.models.load.progress import ProgressBar

    out.parent.mkdir(parents=True, exist_ok=True)
    need, free = conversion.nbytes + SPARE_BYTES, shutil.disk_usage(out.parent).free
    if free < need:
        raise SettingsError(
            f"--out {out}: {need / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free"
        )
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    bar = ProgressBar(f"writing {out.name}")
    try:
        work.chmod(0o755)  # mkdtemp is for secrets
        conversion.write(work, bar)
        for path in work.iterdir():
            with path.open("rb") as file:
                # Before the rename, so that a power cut cannot leave empty files.
                os.fsync(file.fileno())
        work.rename(out)
    finally:
        bar.close()
        shutil.rmtree(work, ignore_errors=True)
