"""A slice of the attacks (`make attack`) that always runs, at a small size: the same code, without a word about time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from attack import floods, memory, processes, strangers, templates
from attack.__main__ import under_attack
from attack.attack import Attack, Scale, Trial
from attack.stack import Programs

SMALL = Scale(1 / 32)
MOST_MB = 96.0  # beside a router that holds about 60
ATTACKS = [*memory.ATTACKS, *templates.ATTACKS, *floods.ATTACKS, *strangers.ATTACKS]


@pytest.fixture(scope="session")
def doc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What workers say of the default model."""
    from headrace.models.source import resolve

    path = tmp_path_factory.mktemp("attack") / "doc.json"
    path.write_bytes(resolve(None).doc())
    return path


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_costs_little_and_nobody_else_fails(attack: Attack, doc: Path) -> None:
    row = await under_attack(attack, Programs.installed(), doc, SMALL)
    assert row.held, row
    assert row.others_failed == 0, row
    assert row.peak_mb - row.rest_mb < min(attack.most_mb, MOST_MB), row


@pytest.mark.parametrize("trial", processes.TRIALS, ids=lambda trial: trial.name)
async def test_nothing_keeps_a_process_from_its_end(trial: Trial, doc: Path) -> None:
    outcome = await asyncio.wait_for(trial.run(Programs.installed(), doc, SMALL), 120)
    assert outcome.held, outcome
