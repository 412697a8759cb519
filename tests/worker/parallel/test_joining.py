"""What a rank decides from its settings before it meets the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.models import UnsupportedModelError
from headrace.models.config import ModelConfig
from headrace.models.load.source import resolve
from headrace.settings.worker import WorkerSettings
from headrace.worker.parallel.joining import rebalance_config
from headrace_kernels.moe.balance import GroupShape
from helpers.models.tiny_deepseek import tiny_deepseek


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tiny_deepseek(tmp_path_factory.mktemp("deepseek") / "tiny")
    return resolve(str(folder)).config


def settings(rounds: int, redundant: int = 0) -> WorkerSettings:
    return WorkerSettings(ep_rebalance_rounds=rounds, ep_redundant=redundant)


def test_experts_stay_unless_rounds_are_given(config: ModelConfig) -> None:
    assert rebalance_config(config, 2, settings(0)) is None


def test_experts_that_move_have_as_many_slots_on_each_rank(config: ModelConfig) -> None:
    assert config.deepseek is not None
    experts = config.deepseek.experts
    found = rebalance_config(config, 2, settings(50, redundant=2))
    assert found is not None
    assert found.rounds_of_window == 50
    assert found.shape == GroupShape(ranks=2, slots=(experts + 2) // 2)
    ranks = next(ranks for ranks in range(3, experts) if experts % ranks)
    more = ranks - experts % ranks
    text = f"{experts} experts do not divide by {ranks} ranks; give --ep-redundant {more}"
    with pytest.raises(UnsupportedModelError, match=text):
        rebalance_config(config, ranks, settings(50))
    rebalance_config(config, ranks, settings(50, redundant=more))
