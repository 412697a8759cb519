"""Servers that the end-to-end tests share. What they printed is shown with a failing test."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from helpers.models.tiny_model import tiny_llama
from helpers.serving.server import Server, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights: it talks nonsense, quickly, and always the same."""
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def real_server() -> Generator[Server]:
    """The default model with its real weights, one worker."""
    with serving(None) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path) -> Generator[Server]:
    """The tiny model, one worker, and deadlines that a test can wait for."""
    with serving(str(tiny_folder), "--header-timeout-ms", "1500") as server:
        yield server


@pytest.fixture
def real(real_server: Server, request: pytest.FixtureRequest) -> Generator[Server]:
    yield from _shown_on_failure(real_server, request)


@pytest.fixture
def tiny(tiny_server: Server, request: pytest.FixtureRequest) -> Generator[Server]:
    yield from _shown_on_failure(tiny_server, request)


def _shown_on_failure(server: Server, request: pytest.FixtureRequest) -> Generator[Server]:
    yield server
    print(server.tail(40))  # captured, and shown only if the test failed
