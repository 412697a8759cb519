"""Put a finished run of `python -m headrace.train_mtp --out RUN` into the repository: head, figures and picture.

python -m bench.mtp.publish RUN
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from bench.helpers.report import ROOT, commit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--note", action="append", default=[], help="kept with the figures")
    args = parser.parse_args()
    figures = json.loads((args.run / "mtp.json").read_text())
    machine = figures.pop("machine")
    figures = {"machine": machine, "commit": commit(), "notes": args.note} | figures
    results = ROOT / "bench" / "results"
    (results / "mtp_training.json").write_text(json.dumps(figures, indent=1) + "\n")
    shutil.copyfile(args.run / "mtp.png", results / "mtp_training.png")
    data = ROOT / "pyworkers" / "headrace" / "models" / "data"
    shutil.copyfile(args.run / "mtp.safetensors", data / "smollm2_mtp.safetensors")


if __name__ == "__main__":
    main()
