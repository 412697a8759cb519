"""Runs the steps of a Dockerfile without Docker: each stage in a chroot made by debootstrap, then its program as its
user, with a read-only root. `make try-container`, as root on Debian or Ubuntu.

It shows that the steps work, that the program starts, is healthy and ends at SIGTERM; with ARGS="--target worker" also
that router and worker answer a chat. It does not show what a container engine adds: its networks, its limits and its
seccomp profile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parents[2]))

from deploy.docker.dockerfile import (
    DockerfileError,
    Stage,
    Step,
    assignments,
    expand,
    ignore_rules,
    sent_files,
    stages,
)

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
START_S, STOP_S, ANSWER_S = 180.0, 60.0, 60.0  # a worker fetches and packs its model first
BUNDLE = "/etc/ssl/of-this-machine.crt"
# keys that the programs ask for where others reach them
SECRETS = {"HEADRACE_API_KEY": "a-key-for-this-trial", "HEADRACE_SECRET": "a-secret-for-it"}
PLAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class TrialError(Exception):
    """A step failed, or the program did; the message says which."""


@dataclass
class Image:
    """What a stage leaves: a folder with its files, and its settings."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"


def ways_out() -> dict[str, str]:
    """How this machine reaches its packages, as variables."""
    names = ("http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL")
    both = [*names, *(name.upper() for name in names)]
    passed = {name: os.environ[name] for name in both if name in os.environ}
    return passed | dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE", "CARGO_HTTP_CAINFO"), BUNDLE)


def say(text: str) -> None:
    print(f"try-container: {text}", flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(list(map(str, command)), check=False, env=env)
    if done.returncode != 0:
        raise TrialError(f"{' '.join(map(str, command))[:300]}: exit status {done.returncode}")


@contextmanager
def mounted(*arguments: str | Path) -> Generator[None]:
    target = arguments[-1]
    run("mount", *arguments)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=False)


@contextmanager
def system_folders(root: Path) -> Generator[None]:
    """/proc and /dev, as a container has them."""
    with ExitStack() as mounts:
        for name, kind in (("proc", "proc"), ("dev", "tmpfs")):
            (root / name).mkdir(exist_ok=True)
            mounts.enter_context(mounted("-t", kind, kind, root / name))
        for number, name in ((3, "null"), (5, "zero"), (8, "random"), (9, "urandom")):
            os.mknod(root / "dev" / name, 0o666 | 0o020000, os.makedev(1, number))
            (root / "dev" / name).chmod(0o666)
        (root / "dev/shm").mkdir(mode=0o1777)
        yield


def debian(cache: Path, mirror: str) -> Path:
    """A minimal Debian, made once."""
    folder = cache / SUITE
    if not (folder / "etc/debian_version").exists():
        say(f"debootstrap {SUITE} (once)")
        part = cache / f"{SUITE}.part"
        shutil.rmtree(part, ignore_errors=True)
        debootstrap = shutil.which("debootstrap")
        if debootstrap is None:
            raise TrialError("debootstrap is needed and was not found: apt install debootstrap")
        run(debootstrap, "--variant=minbase", SUITE, part, mirror)
        part.rename(folder)
    return folder


class Trial:
    """Stages that were built so far, in `work`."""

    def __init__(self, work: Path, cache: Path, mirror: str, context: Path) -> None:
        self._work, self._cache, self._mirror, self._context = work, cache, mirror, context
        self._rules = ignore_rules((context / ".dockerignore").read_text())
        self._images: dict[str, Image] = {}

    def build(self, stage: Stage, all_stages: dict[str, Stage]) -> Image:
        """The stage, after those that it stands on and copies from."""
        if stage.name in self._images:
            return self._images[stage.name]
        image = self._base(stage, all_stages)
        values = dict(image.env)
        for step in stage.steps:
            say(f"{stage.name}: line {step.line}: {step.name} {step.text[:70]}")
            self._do(step, image, values, all_stages)
        self._images[stage.name] = image
        return image

    def _base(self, stage: Stage, all_stages: dict[str, Stage]) -> Image:
        folder = self._work / stage.name
        if stage.base in all_stages:
            below = self.build(all_stages[stage.base], all_stages)
            run("cp", "--archive", "--reflink=auto", below.folder, folder)
            return Image(folder, dict(below.env), below.workdir, below.user)
        name = stage.base.partition(":")[0]
        if name not in {"debian", "rust"}:
            raise TrialError(f"{stage.base}: only images of Debian can be made here")
        run("cp", "--archive", "--reflink=auto", debian(self._cache, self._mirror), folder)
        shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
        self._copy_proxy(folder)
        env = {"PATH": PLAIN_PATH}
        if name == "rust":
            env |= self._put_rust(folder)
        return Image(folder, env)

    def _copy_proxy(self, folder: Path) -> None:
        """How this machine reaches its packages is not the Dockerfile's business."""
        for file in Path("/etc/apt/apt.conf.d").glob("*proxy*"):
            shutil.copy(file, folder / "etc/apt/apt.conf.d")
        # a package of the image writes the usual bundle anew, so this machine's has a place of its own
        kept = (
            ("etc/pip.conf", "etc/pip.conf"),
            ("etc/ssl/certs/ca-certificates.crt", BUNDLE.lstrip("/")),
        )
        for name, to in kept:
            if (Path("/") / name).exists():
                (folder / to).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path("/") / name, folder / to)

    def _put_rust(self, folder: Path) -> dict[str, str]:
        """This machine's compiler, where the official image has its own; with it, as there, a C compiler."""
        sysroot = subprocess.check_output(["rustc", "--print", "sysroot"], text=True).strip()
        toolchain = folder / "usr/local/rust"
        run("cp", "--archive", sysroot, toolchain)
        with system_folders(folder):
            for command in (
                ["update"],
                ["install", "--yes", "--no-install-recommends", "gcc", "libc6-dev"],
            ):
                run("chroot", folder, "apt-get", "--quiet=2", *command, env=self._outside())
        return {"PATH": f"/usr/local/rust/bin:{PLAIN_PATH}", "CARGO_HOME": "/usr/local/cargo"}

    def _outside(self) -> dict[str, str]:
        """Variables that a builder passes on by itself."""
        return {"PATH": PLAIN_PATH, "DEBIAN_FRONTEND": "noninteractive"} | ways_out()

    def _do(
        self, step: Step, image: Image, values: dict[str, str], all_stages: dict[str, Stage]
    ) -> None:
        match step.name:
            case "ARG":
                name, _, value = step.text.partition("=")
                values.setdefault(name, value)
            case "ENV":
                added = {k: expand(v, values) for k, v in assignments(step.text).items()}
                image.env |= added
                values |= added
            case "WORKDIR":
                image.workdir = expand(step.text, values)
                (image.folder / image.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = step.text
            case "RUN":
                self._run(step, image, values)
            case "COPY":
                self._copy(step, image, all_stages)
            case _:  # says how the image is started, which `start` reads
                pass

    def _run(self, step: Step, image: Image, values: dict[str, str]) -> None:
        words = step.exec_form() or ["/bin/sh", "-c", step.text]
        inside = f'cd "{image.workdir}" && exec "$@"'
        with ExitStack() as mounts:
            mounts.enter_context(system_folders(image.folder))
            for mount in step.flag("mount"):
                options = dict(part.split("=", 1) for part in mount.split(","))
                if options.get("type") != "cache":
                    raise DockerfileError(f"line {step.line}: a mount that is no cache")
                kept = self._cache / "mounts" / options["target"].strip("/").replace("/", "-")
                kept.mkdir(parents=True, exist_ok=True)
                target = image.folder / options["target"].strip("/")
                target.mkdir(parents=True, exist_ok=True)
                mounts.enter_context(mounted("--bind", kept, target))
            run(
                *("chroot", f"--userspec={image.user}", image.folder),
                *("/bin/sh", "-c", inside, "sh", *words),
                env=self._outside() | values | image.env,
            )

    def _copy(self, step: Step, image: Image, all_stages: dict[str, Stage]) -> None:
        *sources, target = step.words()
        place = image.folder / str(PurePosixPath(image.workdir) / target).lstrip("/")
        for source in sources:
            if origin := step.flag("from"):
                self._copy_tree(self.build(all_stages[origin[0]], all_stages).folder, source, place)
                continue
            files = sent_files(self._context, source, self._rules)
            if not files:
                raise TrialError(f"line {step.line}: COPY {source}: no such file in the context")
            start = self._context / source
            for file in files:
                if start.is_dir():
                    to = place / file.relative_to(start)
                else:
                    to = place / file.name if target.endswith("/") else place
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, to, follow_symlinks=False)

    @staticmethod
    def _copy_tree(origin: Path, source: str, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        run("cp", "--archive", "--no-target-directory", origin / source.lstrip("/"), place)


class Container:
    """A program of an image, as a container would run it: as its user; only /tmp and the volumes can be written."""

    def __init__(self, image: Image, stage: Stage, arguments: list[str]) -> None:
        entry, command = stage.last("ENTRYPOINT"), stage.last("CMD")
        assert entry is not None
        self._image, self._name = image, stage.name
        self._words = [*entry.words(), *(command.words() if command else []), *arguments]
        volume = stage.last("VOLUME")
        self._volumes = volume.words() if volume else []
        inside = ["chroot", f"--userspec={image.user}", "--groups=", str(image.folder)]
        self._inside = inside

    @contextmanager
    def running(self, probe: list[str]) -> Generator[None]:
        """Starts it; it must become healthy, write nothing but where it may, and end at SIGTERM with 0."""
        with ExitStack() as mounts:
            folder = self._image.folder
            mounts.enter_context(mounted("--bind", folder, folder))
            mounts.enter_context(system_folders(folder))
            for place in ("/tmp", *self._volumes):
                target = folder / place.strip("/")
                options = f"mode={'1777' if place == '/tmp' else '0700'}"
                if place != "/tmp":
                    user, _, group = self._image.user.partition(":")
                    options += f",uid={user},gid={group or user}"
                mounts.enter_context(mounted("-t", "tmpfs", "-o", options, "tmpfs", target))
            run("mount", "-o", "remount,bind,ro", folder)
            self._is_read_only()
            say(f"start as {self._image.user}, root read-only: {' '.join(self._words)}")
            started_at = time.monotonic()
            process = subprocess.Popen(
                [*self._inside, *self._words], env=ways_out() | self._image.env | SECRETS
            )
            try:
                while self._run(probe).returncode:
                    if process.poll() is not None:
                        raise TrialError(f"it ended with status {process.returncode}")
                    if time.monotonic() - started_at > START_S:
                        raise TrialError("it is not healthy")
                    time.sleep(0.05)
                took_s = time.monotonic() - started_at
                say(f"{self._name} healthy after {took_s:.2f} s, checks included")
                yield
                process.send_signal(signal.SIGTERM)
                status = process.wait(STOP_S)
                if status != 0:
                    raise TrialError(f"after SIGTERM {self._name} ended with status {status}")
                say(f"{self._name} ended at SIGTERM with status 0")
            finally:
                process.kill()
                process.wait()

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self._inside, *words], env=self._image.env, capture_output=True, check=False
        )

    def _is_read_only(self) -> None:
        for folder in ("", "/opt/headrace", "/var/lib/headrace"):
            if folder in self._volumes:
                continue
            path = f"{folder}/written"
            refused = self._run(["/usr/bin/python3", "-c", f"open({path!r}, 'w')"])
            if b"Read-only file system" not in refused.stderr:
                raise TrialError(f"{path} can be written")


def health_check(stage: Stage) -> list[str]:
    check = stage.last("HEALTHCHECK")
    assert check is not None
    return Step(0, "CMD", (), check.text.removeprefix("CMD ")).words()


def ask() -> str:
    """What a chat through the router gets from the worker."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {SECRETS['HEADRACE_API_KEY']}",
    }
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), headers
    )
    until = time.monotonic() + ANSWER_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            # the worker is ready, and the router has yet to hear what it serves
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > until:
                raise
            time.sleep(0.05)


def try_out(target: str, images: Callable[[str], Image], known: dict[str, Stage]) -> None:
    """Runs the router, and beside it the worker if that is what is tried."""
    router = Container(images("router"), known["router"], [])
    with router.running(health_check(known["router"])):
        if target == "worker":
            flags = ["--router", "127.0.0.1:8001", "--http-port", "8002"]
            worker = Container(images("worker"), known["worker"], flags)
            ready = ["python", "/opt/headrace/health.py", "http://127.0.0.1:8002/readyz"]
            with worker.running(ready):
                say(f"the router and the worker answer: {ask()!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--file", type=Path, default=ROOT / "deploy/docker/Dockerfile")
    parser.add_argument("--target", default="router")
    parser.add_argument("--work", type=Path, default=ROOT / "target/container")
    parser.add_argument("--mirror", default=MIRROR)
    flags = parser.parse_args()
    if os.geteuid() != 0:
        print("try-container: chroot and mounts need root", file=sys.stderr)
        return 1
    work = flags.work / "stages"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        known = {stage.name: stage for stage in stages(flags.file.read_text())}
        stage = known[flags.target]
        trial = Trial(work, flags.work, flags.mirror, ROOT)
        image = trial.build(stage, known)
        size = subprocess.check_output(["du", "-sm", image.folder], text=True).split()[0]
        say(f"{stage.name}: {size} MB")
        try_out(flags.target, lambda name: trial.build(known[name], known), known)
    except (TrialError, DockerfileError, OSError) as error:
        print(f"try-container: {error}", file=sys.stderr)
        return 1
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
