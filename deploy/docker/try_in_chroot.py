"""Runs the steps of a Dockerfile without Docker: each stage in a chroot made by debootstrap, then its program as its
user, with a read-only root. `make try-container`, as root on Debian or Ubuntu.

It shows that the steps work, that the program starts, is healthy and ends at SIGTERM. It does not show what a container
engine adds: its networks, its limits and its seccomp profile.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
START_S, STOP_S = 60.0, 60.0
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
        for name in ("etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
            if (Path("/") / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path("/") / name, folder / name)

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
        names = ("http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "PIP_CERT")
        both = [*names, *(name.upper() for name in names)]
        passed = {name: os.environ[name] for name in both if name in os.environ}
        return {"PATH": PLAIN_PATH, "DEBIAN_FRONTEND": "noninteractive"} | passed

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


def try_out(image: Image, stage: Stage) -> None:
    """Start it as its user with a read-only root; it must become healthy, write nothing, and end at SIGTERM with 0."""
    entry, command, check = (stage.last(name) for name in ("ENTRYPOINT", "CMD", "HEALTHCHECK"))
    assert entry is not None and check is not None
    words = [*entry.words(), *(command.words() if command else [])]
    probe = Step(0, "CMD", (), check.text.removeprefix("CMD ")).words()
    with ExitStack() as mounts:
        folder = image.folder
        mounts.enter_context(mounted("--bind", folder, folder))
        mounts.enter_context(system_folders(folder))
        mounts.enter_context(mounted("-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder / "tmp"))
        run("mount", "-o", "remount,bind,ro", folder)
        inside = ["chroot", f"--userspec={image.user}", "--groups=", str(folder)]
        env = image.env
        for path in ("/written", "/opt/headrace/written", "/var/lib/headrace/written"):
            code = f"open({path!r}, 'w')"
            refused = subprocess.run(
                [*inside, "/usr/bin/python3", "-c", code], env=env, capture_output=True, check=False
            )
            if b"Read-only file system" not in refused.stderr:
                raise TrialError(f"{path} can be written")
        say(f"start as {image.user}, root read-only: {' '.join(words)}")
        # keys that the program asks for where others reach it
        secrets = {"HEADRACE_API_KEY": "a-key-for-this-trial", "HEADRACE_SECRET": "a-secret-for-it"}
        started_at = time.monotonic()
        process = subprocess.Popen([*inside, *words], env=env | secrets)
        try:
            while subprocess.run([*inside, *probe], env=env, stderr=-3, check=False).returncode:
                if process.poll() is not None:
                    raise TrialError(f"it ended with status {process.returncode}")
                if time.monotonic() - started_at > START_S:
                    raise TrialError("it is not healthy")
                time.sleep(0.05)
            say(f"healthy after {time.monotonic() - started_at:.2f} s, checks included")
            process.send_signal(signal.SIGTERM)
            status = process.wait(STOP_S)
            if status != 0:
                raise TrialError(f"after SIGTERM it ended with status {status}")
            say("ended at SIGTERM with status 0")
        finally:
            process.kill()
            process.wait()


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
        image = Trial(work, flags.work, flags.mirror, ROOT).build(stage, known)
        size = subprocess.check_output(["du", "-sm", image.folder], text=True).split()[0]
        say(f"{stage.name}: {size} MB")
        try_out(image, stage)
    except (TrialError, DockerfileError, OSError) as error:
        print(f"try-container: {error}", file=sys.stderr)
        return 1
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
