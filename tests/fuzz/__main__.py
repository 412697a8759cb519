"""`make fuzz`: every target for a while; what breaks one is written down, and the exit status is 1.

python -m fuzz [--seconds 60] [--seed N] [--only NAME]...
"""

from __future__ import annotations

import argparse
import sys

from fuzz import crate, files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m fuzz")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", metavar="NAME", help="may be given again")
    arguments = parser.parse_args()
    chosen: set[str] = set(arguments.only or ())
    rust = [name for name in crate.names() if not chosen or name in chosen]
    broken = 0
    if rust:
        folder = crate.build(rust)
        for name in rust:
            ran = crate.run(folder, name, arguments.seconds, arguments.seed)
            line = f"{name:12} {ran.inputs:10,} inputs, {ran.branches:6,} branches"
            print(f"{line}  {ran.problem or 'no fault'}", flush=True)
            broken += ran.problem is not None
    with files.targets() as targets:
        for target in targets:
            if chosen and target.name not in chosen:
                continue
            try:
                count, refused = files.run(target, seed=arguments.seed, seconds=arguments.seconds)
                print(
                    f"{target.name:12} {count:10,} inputs, {refused:,} refused  no fault",
                    flush=True,
                )
            except files.Fault as fault:
                file = crate.BUILT / "broken" / f"{target.name}-{arguments.seed}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(fault.data)
                print(
                    f"{target.name:12} {fault}; the input is {file.relative_to(crate.ROOT)}",
                    flush=True,
                )
                broken += 1
    unknown = chosen - set(crate.names()) - {target.name for target in targets}
    if unknown:
        print(f"no target has the name {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
