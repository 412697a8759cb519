"""A slice of the attacks (`make attack`) that always runs: the same code at a small size, and no word about time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from attack import floods, kv_port, liars, memory, processes, strangers, templates, tenants
from attack.__main__ import MODEL, beside_probe
from attack.attack import Attack, Scale, Trial
from attack.stack import Programs, stack, with_template
from helpers.slices import spread

SMALL = Scale(1 / 32, quiet_s=0.2, least_s=0.2, enough_s=0.3, rest_s=0.0, alone=False)
IN_A_GROUP = 5  # without --all
ATTACKS = [*memory.ATTACKS, *templates.ATTACKS, *floods.ATTACKS, *strangers.ATTACKS, *liars.ATTACKS]


def groups() -> list[list[Attack]]:
    """Attacks that one router can take one after the other."""
    alike: dict[tuple[object, ...], list[Attack]] = defaultdict(list)
    for attack in ATTACKS:
        alike[attack.flags, attack.prefix, attack.template].append(attack)
    return list(alike.values())


@pytest.fixture(scope="session")
def doc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What workers say of the default model."""
    from headrace.models.load.source import resolve

    path = tmp_path_factory.mktemp("attack") / "doc.json"
    path.write_bytes(resolve(None).doc())
    return path


@pytest.mark.parametrize("attacks", groups(), ids=lambda attacks: attacks[0].name)
async def test_attacks_cost_little_and_nobody_else_fails(
    attacks: list[Attack], doc: Path, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.option.all_cases:
        attacks = [attacks[i] for i in spread(len(attacks), IN_A_GROUP)]
    first = attacks[0]
    doc = doc if first.template is None else with_template(doc, first.template)
    async with stack(
        Programs.installed(), MODEL, doc, first.flags, wrapper=first.prefix
    ) as running:
        for attack in attacks:
            row = await beside_probe(attack, running, SMALL)
            assert row.held, row
            assert row.others_failed == 0, row
            assert row.peak_mb - row.rest_mb < min(attack.most_mb, attack.slice_mb), row
        assert await asyncio.to_thread(running.router.end) is not None, "SIGTERM did not end it"


@pytest.mark.parametrize("trial", processes.TRIALS, ids=lambda trial: trial.name)
async def test_nothing_keeps_a_process_from_its_end(trial: Trial, doc: Path) -> None:
    outcome = await asyncio.wait_for(trial.run(Programs.installed(), doc, SMALL), 120)
    assert outcome.held, outcome


@pytest.mark.parametrize("trial", [*tenants.TRIALS, *kv_port.TRIALS], ids=lambda trial: trial.name)
async def test_who_has_no_key_or_ticket_learns_nothing(trial: Trial, doc: Path) -> None:
    outcome = await asyncio.wait_for(trial.run(Programs.installed(), doc, SMALL), 60)
    assert outcome.held, outcome
