"""What a rank decides from its settings before it meets the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.models import UnsupportedModelError, check_ranks
from headrace.models.config import ModelConfig
from headrace.models.load.source import resolve
from headrace.settings.values import SettingsError
from headrace.settings.worker import WorkerSettings, step_sizes
from headrace.worker.load_model import load
from headrace.worker.parallel.environment import read_environment
from headrace.worker.parallel.joining import join, rebalance_config
from headrace_kernels.moe.balance import GroupShape
from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.models.tiny_model import tiny_llama
from helpers.worker.rank_processes import variables


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
    check_ranks(config, ranks)
    with pytest.raises(UnsupportedModelError, match=text):
        check_ranks(config, ranks, moves=True)
    check_ranks(config, ranks, more, moves=True)
    assert rebalance_config(config, ranks, settings(50, redundant=more)) is not None


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("moves", [False, True])
def test_the_number_of_slots_that_is_told_is_one_that_fits(
    config: ModelConfig, ranks: int, moves: bool
) -> None:
    for redundant in range(1, 100):
        try:
            check_ranks(config, ranks, redundant, moves=moves)
        except UnsupportedModelError as error:
            text, _, told = str(error).rpartition("; give --ep-redundant ")
            assert text.startswith(f"--ep-redundant {redundant}: ")
            check_ranks(config, ranks, int(told), moves=moves)


def test_what_does_not_fit_the_model_is_told_before_the_group_meets(tmp_path: Path) -> None:
    """By the settings' own error, so that the status is that of a wrong flag."""
    checkpoint = resolve(str(tiny_deepseek(tmp_path / "tiny")))
    given = WorkerSettings(ep_rebalance_rounds=50)
    environment = read_environment(variables(0, 3, 1))
    assert environment is not None
    sizes, cpu = step_sizes(given, "cpu"), torch.device("cpu")
    with pytest.raises(SettingsError, match=r"8 experts do not divide by 3 ranks; give .* 1$"):
        join(environment, given, checkpoint, sizes, cpu)


def test_a_worker_without_a_group_says_what_it_ignores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(tiny_llama(tmp_path / "tiny"))
    load(WorkerSettings(model=model, kv_memory_bytes=1 << 20, device="cpu"))
    assert "is in no group" not in caplog.text
    caplog.clear()
    given = WorkerSettings(ep_redundant=1, ep_transport="gloo")
    load(replace(given, model=model, kv_memory_bytes=1 << 20, device="cpu"))
    said = "no effect of --ep-transport and --ep-redundant: this worker is in no group"
    assert said in caplog.text
