"""A router with mock workers of every kind, whose /metrics the tests of dashboard, alerts and Prometheus share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from helpers.serving.fleet import Fleet, fleet_of_every_kind


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    with fleet_of_every_kind(tmp_path_factory.mktemp("fleet")) as running:
        yield running
