"""What commands write into `docs/benchmarks.md` is what their results say."""

from __future__ import annotations

import json

from bench.budget import __main__ as budget
from bench.budget import rules
from bench.helpers import page
from bench.peers import table

PAGE = page.PAGE.read_text()


def test_the_tables_of_other_routers_are_those_of_their_result() -> None:
    results = [json.loads(path.read_text()) for path in table.RESULTS]
    assert page.split(PAGE, table.COMMAND)[1] == table.tables(results).strip()


def test_the_table_of_budgets_is_that_of_their_file() -> None:
    file = budget.FILE
    wanted = rules.page(file.read_text(), budget.WHAT).strip() if file.exists() else page.NOTHING
    assert page.split(PAGE, budget.COMMAND)[1] == wanted
