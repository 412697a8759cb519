"""The arithmetic of `make bench-peers`: spreads, what a router adds, what cannot run, and the tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.helpers import page
from bench.peers import table
from bench.peers.__main__ import arguments, in_turns
from bench.peers.cases import CASES, OTHER_DESCRIPTORS, Case, share
from bench.peers.measure import Setting, figures, loads, note, sources, why_not
from bench.peers.routers import Direct, Headrace, Nginx, Sglang
from bench.peers.summary import added, spread, summary
from bench.peers.systems import UNEVEN, WORKERS, Programs, Running, free_addresses

PROGRAMS = Programs(router=[], bench=[], mock=[], doc=None)
CASE = Case(name="B", what="streams", streams=4, max_tokens=8)
PACED = {case.streams: case for case in CASES if case.name.startswith("C")}
STALLED = next(case for case in CASES if case.stalled)
HERE = 20_000  # descriptors of a process


def run(peer: str, number: int, case: str = "B", **figures: Any) -> dict[str, Any]:
    usual = {"errors": 0, "client_cores": 0.1}
    return {
        "peer": peer,
        "case": case,
        "round": number,
        "note": None,
        "why_not": None,
        "figures": usual | figures,
    }


def report(**fields: Any) -> dict[str, Any]:
    quantiles = {"p50": 1.0, "p99": 2.0}
    return {
        "requests": 12,
        "errors": 2,
        "errors_by_kind": {"503": 2},
        "requests_per_s": 5.0,
        "wall_s": 2.0,
        "chunks": 40,
        "completion_tokens": 80,
        "cpu_s": [0.001, 0.003, 0.5, 0.3],
        "client_cpu_share": 0.2,
        "ttft_ms": quantiles,
        "itl_ms": quantiles,
        "token_hit_rate": None,
    } | fields


def test_a_spread_is_the_median_with_the_extremes_of_what_is_known() -> None:
    assert spread([3.0, None, 1.0, 2.5]) == [2.5, 1.0, 3.0]
    assert spread([None]) is None


def test_figures_are_of_the_routers_processes_alone() -> None:
    found = figures(CASE, report(), router_processes=2)
    assert found["router_us_a_request"] == pytest.approx(400.0)  # 0.004 s for 10 answers
    assert found["router_us_a_token"] == pytest.approx(50.0)
    assert found["router_us_an_event"] == pytest.approx(100.0)
    assert found["events_a_token"] == 0.5
    assert found["worker_us_a_token"] == pytest.approx(10_000.0)
    assert found["router_cores"] == pytest.approx(0.002)
    assert found["tokens_per_s"] == 40.0
    assert (found["ttft_p50_ms"], found["itl_p99_ms"]) == (1.0, 2.0)
    assert found["late_p99_ms"] is None  # nobody looked


def test_how_late_tokens_are_is_asked_where_all_have_one_text() -> None:
    flags = PACED[2048].flags(4.0)
    assert flags[flags.index("--pace") :][:4] == ["--pace", "20.0ms", "--token-text", " water"]
    assert "--pace" not in CASE.flags(4.0)
    found = figures(PACED[2048], report(late_ms={"p50": 3.0, "p99": 9.0}), router_processes=1)
    assert (found["late_p50_ms"], found["late_p99_ms"]) == (3.0, 9.0)


def test_without_a_router_there_is_nothing_to_tell_of_it() -> None:
    found = figures(CASE, report(), router_processes=0)
    names = ["router_us_a_request", "router_us_a_token", "router_us_an_event", "router_cores"]
    assert [found[name] for name in names] == [None] * 4
    assert found["worker_us_a_request"] == pytest.approx(80_400.0)


def test_tokens_that_no_answer_counts_are_those_that_were_asked_for() -> None:
    found = figures(CASE, report(completion_tokens=0), router_processes=1)
    assert found["tokens_per_s"] == 10 * 8 / 2.0


def test_an_answer_that_comes_whole_has_no_events() -> None:
    unary = Case(name="A", what="", streams=4, max_tokens=1, unary=True)
    found = figures(unary, report(itl_ms=None), router_processes=1)
    assert found["events_a_token"] is None
    assert found["router_us_an_event"] is None
    assert found["itl_p50_ms"] is None


def test_what_a_router_adds_is_taken_within_each_round() -> None:
    mine = [run("x", 0, ttft_p50_ms=15.0), run("x", 1, ttft_p50_ms=130.0), run("x", 2)]
    without = [run("direct", 1, ttft_p50_ms=100.0), run("direct", 0, ttft_p50_ms=5.0)]
    assert added(mine, without) == {"added_ttft_p50_ms": [20.0, 10.0, 30.0]}


def test_a_summary_has_a_row_for_each_case_and_peer() -> None:
    failed = run("x", 1) | {"figures": {}, "why_not": "it died"}
    runs = [
        run("direct", 0, ttft_p50_ms=1.0),
        run("x", 0, ttft_p50_ms=3.0, errors=2),
        failed,
        run("own", 0, ttft_p50_ms=3.0, client_cores=0.9),
    ]
    direct, x, own = summary(runs, own_engines={"own"})
    assert (direct["peer"], direct["runs"], direct["errors"]) == ("direct", 1, 0)
    assert not any(name.startswith("added") for name in direct["figures"])
    assert (x["runs"], x["errors"], x["why_not"]) == (1, 2, ["it died"])
    assert x["figures"]["added_ttft_p50_ms"] == [2.0, 2.0, 2.0]
    assert "added_ttft_p50_ms" not in own["figures"], "its workers keep a time of their own"
    assert (x["client_is_limit"], own["client_is_limit"]) == (False, True)


def test_a_case_that_needs_more_descriptors_than_a_process_may_have_is_named() -> None:
    sglang = Sglang(PROGRAMS, HERE)
    assert why_not(sglang, PACED[9_900]) is None
    assert "39,150 descriptors" in (why_not(sglang, PACED[19_500]) or "")
    assert "60,150 descriptors" in (why_not(sglang, PACED[30_000]) or "")
    assert why_not(Sglang(PROGRAMS, 19_952), STALLED) is None
    assert "19,952 descriptors" in (why_not(Sglang(PROGRAMS, 19_951), STALLED) or "")
    none_left = why_not(Headrace(PROGRAMS, OTHER_DESCRIPTORS), CASE)
    assert none_left == "needs 151 descriptors in one process; here a process may have 150"


@pytest.mark.parametrize(
    ("streams", "limit", "processes"),
    [(19_850, 20_000, 1), (19_851, 20_000, 2), (39_700, 20_000, 2), (39_701, 20_000, 3)],
)
def test_routers_and_clients_are_as_many_as_their_streams_need(
    streams: int, limit: int, processes: int
) -> None:
    case = Case(name="C", what="", streams=streams, max_tokens=1)
    for system in (Headrace(PROGRAMS, limit), Direct(PROGRAMS, limit)):
        assert system.clients(case) == processes
        assert system.descriptors(case) == math.ceil(streams / processes) + OTHER_DESCRIPTORS
        assert why_not(system, case) is None


def test_clients_that_read_nothing_are_one_process() -> None:
    few = Headrace(PROGRAMS, 10_050)
    assert few.clients(STALLED) == 1
    assert "10,051 descriptors" in (why_not(few, STALLED) or "")
    assert why_not(Headrace(PROGRAMS, 10_051), STALLED) is None


def test_where_one_process_suffices_there_is_one() -> None:
    for case in CASES:
        if case.streams < HERE:
            headrace, direct = Headrace(PROGRAMS, HERE), Direct(PROGRAMS, HERE)
            assert (headrace.clients(case), direct.clients(case)) == (1, 1), case.name
            assert direct.workers(case) == WORKERS
            assert note(headrace, case) is note(direct, case) is None


def test_what_is_particular_about_thirty_thousand_streams_is_noted() -> None:
    case = PACED[30_000]
    assert note(Headrace(PROGRAMS, HERE), case) == "2 routers, 2 clients"
    assert note(Direct(PROGRAMS, HERE), case) == "2 clients"
    assert note(Direct(PROGRAMS, 12_000), case) == "3 workers, 3 clients"
    assert note(Nginx(PROGRAMS, HERE), case) == "4 processes, 2 clients"
    for system in (Headrace(PROGRAMS, HERE), Direct(PROGRAMS, HERE), Nginx(PROGRAMS, HERE)):
        assert why_not(system, case) is None, system.name


def test_nginx_gets_as_many_processes_as_its_streams_need() -> None:
    nginx = Nginx(PROGRAMS, HERE)
    for streams, least in [(19_500, 3), (30_000, 4)]:
        case = PACED[streams]
        assert nginx.processes(case) >= least
        mean = case.descriptors(2) / nginx.processes(case)
        assert mean * UNEVEN <= nginx.descriptors(case) <= HERE


def test_workers_behind_nginx_have_descriptors_for_their_streams() -> None:
    for case in PACED.values():
        assert Nginx(PROGRAMS, HERE).http_workers(case) == WORKERS, case.name
    few = Nginx(PROGRAMS, 900)
    assert few.http_workers(PACED[2_048]) == 4, "of three each had too few"
    assert note(few, PACED[2_048]) == "7 processes, 4 workers, 3 clients"


def test_parts_of_a_load_are_all_of_it() -> None:
    assert share(10, 3) == [4, 3, 3]
    case = Case(name="C", what="", streams=5, max_tokens=1, requests=7)
    assert [(part.streams, part.requests) for part in case.parts(2)] == [(3, 4), (2, 3)]
    assert case.parts(1) == [case]
    timed = Case(name="A", what="", streams=4, max_tokens=1).parts(2)
    assert [part.requests for part in timed] == [0, 0], "as many as fit into the time"


def test_each_client_has_its_router_and_prompts_of_its_own() -> None:
    case = Case(name="C", what="", streams=5, max_tokens=1, requests=7)
    setting = Setting(bench=["bench"], seconds=1.0, seed=1)

    def flags(*addresses: str) -> list[tuple[str | None, ...]]:
        commands = loads(Running(addresses=[*addresses]), case, setting, ["--pids", "1,2"])
        return [
            tuple(
                str(command[command.index(flag) + 1]) if flag in command else None
                for flag in ("--target", "-c", "-n", "--first", "--pids")
            )
            for command in commands
        ]

    assert flags("a") == [("a", "5", "7", None, "1,2")]
    assert flags("a", "b") == [
        ("a", "3", "4", None, "1,2"),
        ("b", "2", "3", "1000000", "1,2"),
    ]


def test_clients_need_ports_for_their_own_streams_alone() -> None:
    setting = Setting(bench=["bench"], seconds=1.0, seed=1)
    (one,) = loads(Running(addresses=["a"]), PACED[30_000], setting, [])
    assert one.count("--source") == 2
    for command in loads(Running(addresses=["a", "b"]), PACED[30_000], setting, []):
        assert "--source" not in command, "each has another address to dial"


def test_more_connections_than_an_address_has_ports_come_from_several() -> None:
    assert sources(25_000) == []
    assert sources(25_001) == ["--source", "127.0.0.1", "--source", "127.0.0.2"]


def test_clients_have_different_addresses() -> None:
    assert len(set(free_addresses(20))) == 20


def test_every_round_begins_with_another_system() -> None:
    systems = [Direct(PROGRAMS, HERE), Headrace(PROGRAMS, HERE)]
    turns = in_turns(list(systems), [CASE], rounds=3)
    names = [(number, system.name) for number, _, system in turns]
    assert [name for _, name in names] == [
        *("direct", "headrace"),
        *("headrace", "direct"),
        *("direct", "headrace"),
    ]


@pytest.mark.parametrize(
    ("typed", "says"),
    [(["--peers", "direct,envoy"], "envoy"), (["--cases", "Z"], "--cases Z")],
)
def test_an_unknown_peer_or_case_is_named(
    typed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(typed)
    assert says in capsys.readouterr().err


def result(runs: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    usual = {
        "machine": {"processor": "P", "cores": 2},
        "commit": "abc",
        "command": "python -m bench.peers",
        "versions": {"nginx": "1.2"},
        "not_installed": {},
        "rounds": 2,
        "cases": {"B": "streams"},
        "summary": summary(runs, set()),
    }
    return usual | fields


def test_the_tables_show_medians_losses_and_what_is_missing() -> None:
    runs = [
        run("direct", 0, worker_us_a_token=3.0),
        run("direct", 1, worker_us_a_token=4.0),
        run("headrace", 0, router_us_a_token=10.0, client_cores=0.9),
        run("nginx", 0, router_us_a_token=5.0) | {"figures": {}, "why_not": "too few descriptors"},
    ]
    text = table.table(result(runs, not_installed={"dynamo": "no such file"}))
    twice = table.tables([result(runs), result(runs)])  # of a case the first
    assert twice.count("| Headrace |") == table.table(result(runs)).count("| Headrace |") > 0
    assert "| no router: a loop of writes | 3.50 (3 to 4) |" in text
    assert f"| Headrace | 10{table.LIMIT_MARK} |" in text
    assert "| nginx | not run |" in text
    assert "- nginx, B: too few descriptors" in text
    assert "- dynamo's frontend is missing, since it could not be installed: no such file" in text
    assert "The client used more than 0.8 of a core" in text
    assert "C512" not in text, "nothing of it was measured"


def test_the_table_says_where_several_clients_were_needed() -> None:
    several = run("headrace", 0, clients=2) | {"note": "2 routers, 2 clients"}
    text = table.table(result([several, run("nginx", 0, clients=1), run("direct", 0)]))
    assert "- Headrace, B: 2 routers, 2 clients. A percentile is the greatest" in text
    assert text.count("A percentile is") == 1


def test_thirty_thousand_streams_have_a_table() -> None:
    text = table.table(result([run("headrace", 0, case="C30000", tokens_per_s=5.0)]))
    assert "C30000: tokens/s" in text


def test_the_page_gets_its_tables_between_its_marks() -> None:
    other = f"{page.begin('y')}\nkept\n{page.END}\n"
    text = f"a\n{page.begin('x')}\nold\n{page.END}\nb\n{other}"
    once = page.put(text, "x", "new\n")
    assert once == f"a\n{page.begin('x')}\n\nnew\n\n{page.END}\nb\n{other}"
    assert page.put(once, "x", "new\n") == once
    for without in ("a\n", f"{page.begin('x')}\n"):
        with pytest.raises(SystemExit, match="marks"):
            page.put(without, "x", "new\n")
