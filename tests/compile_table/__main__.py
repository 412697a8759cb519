"""Write the table of bench/results/kernel_resources.json, and print it.

make compile-table
"""

from __future__ import annotations

import sys

from compile_table.table import FILE, markdown, save, too_much
from compile_table.tritons import OLDEST, measured


def main() -> None:
    if not OLDEST.exists():
        sys.exit(f"{OLDEST} has no Triton; `make compile-table` installs it")
    found = [measured(), measured(OLDEST)]
    rows = [row for each in found for row in each.rows]
    save(rows)
    print(markdown(rows))
    print(f"\n{FILE}: {len(rows)} kernels, {sum(each.compiled for each in found)} compiled now")
    if faults := too_much(rows):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
