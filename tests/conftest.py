"""What all tests share: threads, no hub, Ctrl-C as a terminal has it, what must be there, and a real etcd."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

from helpers import require, slices
from helpers.serving.etcd import EtcdServer, etcd_binary

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before anything imports torch or numpy
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach no hub

try:
    import torch
except ModuleNotFoundError:  # `make test-without-torch`
    pass
else:
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before any test imports triton

# How long a case takes depends on what else the machine does; pytest has a time-out for each test.
hypothesis.settings.register_profile("slice", deadline=None, max_examples=25)
hypothesis.settings.register_profile("all", deadline=None, max_examples=150)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that runs us in the background makes us, and every process that a test starts, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # `nohup` does the same to servers that are to read files again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", dest="all_cases", help="`make test-all`: no slices"
    )


def pytest_configure(config: pytest.Config) -> None:
    require.check_packages()
    hypothesis.settings.load_profile("all" if config.option.all_cases else "slice")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.all_cases:
        slices.keep_slice(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    require.check_marks(item)


@pytest.fixture
def etcd(tmp_path: Path) -> Generator[EtcdServer]:
    server = EtcdServer(etcd_binary(), tmp_path / "etcd")
    try:
        server.start()
        yield server
    finally:
        server.close()
