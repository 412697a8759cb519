"""Workers that are groups of ranks, as real processes: the text of one rank, and ranks that fail or leave together."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaos.network import ROUTER_HOST, Network, Place, inside, namespaces, no_namespaces
from headrace.exit_status import EXIT_RANK_LOST
from helpers.models.tiny_deepseek import tiny_deepseek
from helpers.models.tiny_model import tiny_llama
from helpers.ports import held_ports
from helpers.require import missing
from helpers.serving.server import Running, Server, eventually, serving
from helpers.worker.rank_processes import variables

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
EVERY_RANK = ("--policy", "round-robin")  # gets requests, also where they come one after the other
PROMPTS = ("Water flows down the hill and", "A mill", "The head of the stream is", "Once")
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 1, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "n": 2},
    {"temperature": 1, "seed": 7, "top_p": 0.8, "presence_penalty": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek(tmp_path_factory.mktemp("deepseek") / "tiny", mtp=True)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """The answers of one worker that has all experts and drafts nothing."""
    with serving(str(folder)) as server:
        return [choices for choices, _ in answers(server)]


def answers(server: Server) -> list[tuple[Any, str]]:
    """Of all that is asked at once, and which worker gave each."""
    bodies = [
        {"model": server.model, "prompt": prompt, "max_tokens": 30, "ignore_eos": True} | asked
        for prompt in PROMPTS
        for asked in ASKED
    ]

    def ask(body: dict[str, Any]) -> tuple[Any, str]:
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        return reply.json["choices"], reply.headers["x-headrace-worker"]

    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(ask, bodies))


def group_of(server: Server, rank: str) -> dict[str, Any]:
    return server.workers()[rank]["group"]


def rank_process(server: Server, worker: str, rank: int) -> psutil.Process:
    """One rank of a supervised group."""
    for child in server.children():
        named = f"--name={worker}" in child.cmdline()
        if named and child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no process is rank {rank} of {worker}:\n{server.tail()}")


def check_group(server: Server, found: list[tuple[Any, str]], ranks: int) -> str:
    """Every rank serves, and all say the same of their group; how their rows go."""
    names = [f"worker-0-rank-{rank}" for rank in range(ranks)]
    assert server.workers().keys() == set(names)
    assert {worker for _, worker in found} == set(names), "every rank serves"
    groups = [group_of(server, name) for name in names]
    assert [one["rank"] for one in groups] == list(range(ranks))
    assert {(one["id"], one["size"]) for one in groups} == {("worker-0", ranks)}
    assert len({one["epoch"] for one in groups}) == 1
    [transport] = {one["transport"] for one in groups}
    return transport


@pytest.mark.thorough  # below one drafts, rebalances and shares memory; that of two hosts has gloo
@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        (["--ep", "2", "--ep-transport", "shared-memory"], "shared-memory"),
        (["--ep", "2", "--mtp", "2", "--mtp-fixed"], None),
        (["--ep", "4", "--ep-redundant", "4", "--mtp", "1"], None),
        (["--ep", "2", "--ep-transport", "gloo"], "gloo"),
    ],
    ids=["two", "drafting", "four with replicas", "gloo"],
)
def test_a_group_gives_the_answers_of_one_rank(
    folder: Path, alone: list[Any], flags: list[str], transport: str | None
) -> None:
    with serving(str(folder), *flags, *EVERY_RANK) as server:
        found = answers(server)
        assert [choices for choices, _ in found] == alone
        went = check_group(server, found, int(flags[1]))
        assert went == transport or (transport is None and went), "or what was quickest"
        server.wait_idle()


def test_ranks_weigh_moves_of_experts_between_steps_answer_the_same_and_stop_without_a_warning(
    folder: Path, alone: list[Any]
) -> None:
    flags = ["--ep", "2", "--ep-rebalance-rounds", "2", "--mtp", "1", *EVERY_RANK]
    with serving(str(folder), *flags, "--ep-transport", "shared-memory") as server:
        found = answers(server)
        assert [choices for choices, _ in found] == alone
        assert check_group(server, found, 2) == "shared-memory"
        said = server.wait_line(r"worker-0-rank-0 +\| .*(experts: \d+ of \d+ layers change.*)")
        # The other rank decides the same by the same figures.
        server.wait_line(r"worker-0-rank-1 +\| .*" + re.escape(said[1].rstrip()))
        assert [choices for choices, _ in answers(server)] == alone
        server.wait_idle()
        waves = r'headrace_rank_expert_waves_total\{.*worker="worker-0-rank-1"'
        eventually(  # it comes with a heartbeat
            lambda: re.search(waves, server.get("/metrics").body.decode()),
            lambda: server.get("/metrics").body.decode(),
        )

        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.tail()
        told = [line for line in server.lines if "group leaves as a whole" in line]
        assert len(told) == 1, server.tail()
        alarms = re.compile(r" WARN | ERROR |WARNING|ERROR|leaked")
        assert not [line for line in server.lines if alarms.search(line)], server.tail()


@pytest.fixture(scope="module")
def two_groups(folder: Path) -> Generator[Server]:
    with serving(str(folder), "--ep", "2", "--workers", "2") as server:
        yield server


def test_when_a_rank_dies_its_group_comes_back_as_one_and_answers_go_on_elsewhere(
    two_groups: Server, alone: list[Any]
) -> None:
    server = two_groups
    before = group_of(server, "worker-0-rank-1")
    found: list[list[Any]] = []
    over = threading.Event()

    def ask_on() -> None:
        """So that the rank dies in the middle of something, whenever that is."""
        while not over.is_set():
            found.append([choices for choices, _ in answers(server)])

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        eventually(
            lambda: any(w["running"] for n, w in server.workers().items() if "worker-0" in n),
            server.tail,
        )
        killed = rank_process(server, "worker-0", 1)
        other = rank_process(server, "worker-0", 0)
        killed.kill()
    finally:
        over.set()
        asking.join()
    assert found and all(choices == alone for choices in found)
    server.wait_line(r"worker-0-rank-1 +\| was killed by SIGKILL.*; starting worker-0 again")
    server.wait_line(r"worker-0-rank-0 +\| .*the group is over: rank 1 is lost")
    server.wait_line(r"worker-0 +\| ready, serves", times=2)
    assert not other.is_running(), "the rank that was left did not stay"
    after = group_of(server, "worker-0-rank-1")
    assert after["id"] == before["id"]
    assert after["epoch"] > before["epoch"]
    assert [choices for choices, _ in answers(server)] == alone


def test_a_drain_of_one_rank_is_one_of_its_group(two_groups: Server, alone: list[Any]) -> None:
    server = two_groups
    ready = sum("| ready, serves" in line and "worker-1 " in line for line in server.lines)
    drained = server.post("/workers/worker-1-rank-0/drain", {"budget_ms": 5_000, "hand_over": 0})
    assert drained.status == 202, drained.body
    server.wait_line(r"worker-1-rank-\d +\| left in good order; starting worker-1 again")
    server.wait_line(r"worker-1 +\| ready, serves", times=ready + 1)
    server.wait_line(r'group leaves as a whole group="worker-1"')
    assert not [line for line in server.lines if re.search(r'group lost .*"worker-1"', line)]
    assert [choices for choices, _ in answers(server)] == alone


def group_starts_again(server: Server, frozen: int) -> None:
    """Whatever the group does now: the other rank misses this one, and both are started again."""
    ready = sum(re.search(r"worker-0 +\| ready, serves", line) is not None for line in server.lines)
    process = rank_process(server, "worker-0", frozen)
    process.suspend()
    why = f"the group is over: rank {frozen} is lost: "
    server.wait_line(rf"worker-0-rank-{1 - frozen} +\| .*{why}")
    server.wait_line(r"worker-0 +\| ready, serves", times=ready + 1)
    assert not process.is_running()


def test_a_rank_that_stands_still_is_named_and_its_group_starts_again(
    folder: Path, alone: list[Any], pytestconfig: pytest.Config
) -> None:
    with serving(str(folder), "--ep", "2", "--ep-timeout-ms", "5000") as server:
        if pytestconfig.option.all_cases:  # an idle one is frozen below, too
            group_starts_again(server, frozen=1)
        body = {"model": server.model, "prompt": "x", "max_tokens": 500, "ignore_eos": True}
        asking = threading.Thread(target=lambda: server.post("/v1/completions", body))
        asking.start()
        eventually(lambda: any(one["running"] for one in server.workers().values()), server.tail)
        group_starts_again(server, frozen=0)
        asking.join()
        assert [choices for choices, _ in answers(server)] == alone


def test_groups_that_compute_prompts_hand_their_kv_to_groups_that_answer(
    folder: Path, alone: list[Any]
) -> None:
    flags = ["--ep", "2", "--prefill", "1", "--decode", "1", "--mtp", "1"]
    # this policy splits every request
    with serving(str(folder), *flags, "--policy", "round-robin") as server:
        found = answers(server)
        assert [choices for choices, _ in found] == alone
        kinds = ("prefill", "decode")
        assert {name: worker["role"] for name, worker in server.workers().items()} == {
            f"{kind}-0-rank-{rank}": kind for kind in kinds for rank in range(2)
        }
        groups = {name: group_of(server, f"{name}-0-rank-0") for name in kinds}
        assert [groups[name]["id"] for name in kinds] == ["prefill-0", "decode-0"]
        server.wait_idle()
        pulled = pulls(server)
        assert pulled > 0

        rank_process(server, "prefill-0", 1).kill()
        server.wait_line(r"prefill-0-rank-0 +\| .*the group is over: rank 1 is lost")
        server.wait_line(r"prefill-0 +\| ready, serves", times=2)
        assert [choices for choices, _ in answers(server)] == alone
        server.wait_idle()
        assert pulls(server) > pulled


def pulls(server: Server) -> int:
    """Of KV between workers, that went well."""
    text = server.get("/metrics").body.decode()
    pattern = r'^headrace_transfers_total\{.*outcome="ok"\} (\d+)$'
    return sum(int(number) for number in re.findall(pattern, text, re.MULTILINE))


@pytest.mark.matrix(cases=1)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ep", "4", "--ep-redundant", "3"], "8 experts and 3 more slots do not divide by 4"),
        (["--ep", "16"], "16 ranks for 8 experts: give at most --ep 8"),
        (["--ep", "3", "--ep-rebalance-rounds", "9"], "by 3 ranks; give --ep-redundant 1"),
    ],
)
def test_experts_have_to_divide(folder: Path, flags: list[str], says: str) -> None:
    with closing(Server("serve", str(folder), "--port", "0", *flags)) as server:
        assert server.wait(120) == 2
        assert says in server.tail()
        assert "starting the router" not in server.tail()


def test_a_llama_has_no_experts_to_share(tmp_path: Path) -> None:
    with closing(
        Server("serve", str(tiny_llama(tmp_path / "llama")), "--port", "0", "--ep", "2")
    ) as server:
        assert server.wait(120) == 2
        assert "a llama has no experts that 2 ranks could share" in server.tail()
        assert "starting the router" not in server.tail()


# --- torchrun ---


@contextmanager
def router(*flags: str, env: Mapping[str, str] | None = None) -> Generator[tuple[Server, str]]:
    """A router alone, and where workers dial it."""
    with closing(Server("router", "--port", "0", *flags, env=env)) as server:
        found = server.wait_line(r"headrace-router: (\S+) for clients, (\S+) for workers")
        server.set_url(found[1])
        yield server, found[2]


@pytest.mark.thorough  # on two hosts it starts one, too
def test_torchrun_starts_a_group(folder: Path, alone: list[Any]) -> None:
    with router("--worker-listen", "127.0.0.1:0") as (server, address):
        torchrun = Running(
            *("--standalone", "--nproc-per-node", "2", "-m", "headrace", "worker", str(folder)),
            *("--router", address, "--name", "spread"),
            program=TORCHRUN,
        )
        with closing(torchrun):
            names = {"spread-rank-0", "spread-rank-1"}
            eventually(lambda: ready(server) == names, torchrun.tail, 240)
            assert [choices for choices, _ in answers(server)] == alone


def test_a_rank_that_goes_on_after_its_group_was_over_leaves_by_itself(folder: Path) -> None:
    with router("--worker-listen", "127.0.0.1:0") as (server, address), ExitStack() as started:
        flags = ("--router", address, "--name", "spread", "--ep-timeout-ms", "5000")
        [port] = started.enter_context(held_ports(1))
        ranks = [
            started.enter_context(
                closing(Running("worker", str(folder), *flags, env=variables(rank, 2, port)))
            )
            for rank in range(2)
        ]
        names = {"spread-rank-0", "spread-rank-1"}
        eventually(lambda: ready(server) == names, ranks[0].tail, 240)
        frozen = psutil.Process(ranks[1].process.pid)
        frozen.suspend()
        try:
            assert ranks[0].wait() == EXIT_RANK_LOST
        finally:
            frozen.resume()
        assert ranks[1].wait() == EXIT_RANK_LOST
        ranks[1].wait_line("the group is over: rank . is lost: ")


def test_a_rank_at_an_address_of_somebody_else_says_so_in_lines_of_ours(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ExitStack() as started:
        port = other.getsockname()[1]
        other.settimeout(0.5)
        rank = started.enter_context(
            closing(
                Running(
                    *("worker", str(folder), "--ep-start-timeout-s", "1"),
                    env=variables(1, 2, port),
                )
            )
        )
        while rank.process.poll() is None:
            with contextlib.suppress(OSError), other.accept()[0] as dialled:
                dialled.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert rank.wait() == EXIT_RANK_LOST
        said = rank.tail()
    assert (
        f"rank 0 did not come: what listens at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port} is" in said
    )
    assert "frame #" not in said, "torch has no say"


SECRET = {"HEADRACE_SECRET": "of these workers"}


async def test_ranks_on_two_hosts_give_the_answers_of_one_rank(
    folder: Path, alone: list[Any], tmp_path: Path
) -> None:
    if why := no_namespaces():
        missing("netns", why)
    names = [ROUTER_HOST, "host-0", "host-1"]
    with namespaces(names) as places, ExitStack() as started:
        async with Network(places, 1, tmp_path):
            with inside(places[ROUTER_HOST]):
                listen = f"{places[ROUTER_HOST].address}:0"
                server, address = started.enter_context(
                    router("--worker-listen", listen, *EVERY_RANK, env=SECRET)
                )
            ranks = [
                started.enter_context(on_host(places, node, folder, address)) for node in (0, 1)
            ]
            with inside(places[ROUTER_HOST]):
                expected = {"spread-rank-0", "spread-rank-1"}
                await asyncio.to_thread(
                    eventually,
                    lambda: ready(server) == expected,
                    lambda: "\n".join(one.tail() for one in ranks),
                    240,
                )
                found = await asyncio.to_thread(answers, server)
                groups = [group_of(server, name) for name in sorted(expected)]
            started.close()
    assert [choices for choices, _ in found] == alone
    assert {worker for _, worker in found} == expected, "every rank serves"
    assert [one["transport"] for one in groups] == ["gloo"] * 2


@contextmanager
def on_host(places: dict[str, Place], node: int, folder: Path, address: str) -> Generator[Running]:
    """One of two torchruns, with one rank each."""
    place = places[f"host-{node}"]
    with inside(place):
        torchrun = Running(
            *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"),
            *("--master-addr", places["host-0"].address, "--master-port", "29500"),
            *("-m", "headrace", "worker", str(folder), "--router", address, "--name", "spread"),
            program=TORCHRUN,
            env=SECRET | {"GLOO_SOCKET_IFNAME": place.device},
        )
    with closing(torchrun):
        yield torchrun


def ready(server: Server) -> set[str]:
    return {name for name, one in server.workers().items() if one["state"] == "ready"}
