"""The default model re-expressed as DeepSeek-V3, with its MTP head: made once from the default model, then kept.

Both forms give the default model's own answers on the code path of DeepSeek-R1.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from headrace.models.load.cache import CachedModel, Report, ensure, to_stderr
from headrace.models.load.default_model import DEFAULT_MODEL, Package, ensure_default_model
from headrace.models.load.progress import ProgressBar

__all__ = ["R1_FORMS", "SMOLLM2_HEAD", "ensure_smollm2_r1"]

FORMAT = 1  # of the directory; raise it when the conversion writes something else
SMOLLM2_HEAD = Path(__file__).parent / "data" / "smollm2_mtp.safetensors"

# By name: whether each routed expert is there twice, chosen by a router that depends on the token.
R1_FORMS = {"smollm2-r1": False, "smollm2-r1-paired": True}
DISK_BYTES = {False: 700_000_000, True: 950_000_000}  # 661 and 873 MB with a head of full width


def ensure_smollm2_r1(
    name: str,
    *,
    package: Package = DEFAULT_MODEL,
    head: Path | None = SMOLLM2_HEAD,
    root: Path | None = None,
    report: Report | None = None,
) -> Path:
    """The directory of the form `name`, with the MTP head where that file exists.

    The first call converts the default model, which it fetches where that was not done before. Any number of
    processes may call this at once. Raises `ModelFileError`.
    """
    paired = R1_FORMS[name]
    say = report or to_stderr
    found = head if head is not None and head.exists() else None
    entry = CachedModel(
        name=name,
        directory_name=f"{name}-{package.sha256[:12]}-{_digest(found)}-v{FORMAT}",
        disk_bytes=DISK_BYTES[paired],
        origin={"from": package.requirement, "licence": "Apache-2.0"},
    )

    def make(_work: Path, out: Path) -> None:
        from headrace.models.load.checkpoint import SafetensorsCheckpoint
        from headrace.models.r1_demo.deepseek_folder import plan

        source = SafetensorsCheckpoint(
            ensure_default_model(package, root=root, report=report), package.name
        )
        say(f"converting {package.name} to {name}, once")
        bar = ProgressBar(f"writing {name}")
        try:
            plan(source, paired=paired, head=found).write(out, bar)
        finally:
            bar.close()

    return ensure(entry, make, root=root, say=say)


def _digest(head: Path | None) -> str:
    """Names the head in the name of a directory: another head is another model."""
    return "no-mtp" if head is None else hashlib.sha256(head.read_bytes()).hexdigest()[:8]
