"""`headrace plan`: the answer as text, JSON and a picture, and one line for each thing that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.exit_status import EXIT_CONFIG, EXIT_USAGE
from headrace.planner.trace import read_trace

TAU = Path(__file__).parents[2] / "bench/traces/tau_airline_tasks0-32.blocks16.jsonl.gz"
USUAL = {"--trace": str(TAU), "--gpu": "h200", "--slo": "ttft=2s,tpot=80ms", "--price": "2.5"}


def argv(**changed: str | None) -> list[str]:
    flags = USUAL | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return ["plan", *(f"{name}={value}" for name, value in flags.items() if value is not None)]


def refused(capsys: pytest.CaptureFixture[str], *more: str, **changed: str | None) -> str:
    """The last line of the error."""
    try:
        status = main.main([*argv(**changed), *more])
    except SystemExit as error:
        status = error.code
    assert status == EXIT_USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err.splitlines()[-1]


def planned(capsys: pytest.CaptureFixture[str], **changed: str | None) -> dict[str, Any]:
    assert main.main([*argv(**changed), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_answer_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "DeepSeek-R1 on h200, modelled: tau_airline_tasks0-32, 1,863 requests"
    )
    assert lines[1] == "limits for 99 %: ttft=2s, tpot=80ms"
    assert [line.split()[0] for line in lines[3:7]] == ["GPUs", "prefill", "decode", "price"]
    assert sum(line.endswith("<") for line in lines) == 1
    assert "as published systems had them" in lines[-1]
    assert max(map(len, lines)) <= 120


def test_the_document_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv(speed="10")) == 0
    document = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```" in document


def test_the_answer_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, speed="20")
    plan = found["plan"]
    prefill, decode = plan["prefill"], plan["decode"]
    assert prefill["gpus"] == prefill["groups"] * prefill["ep"]
    assert plan["gpus"] == prefill["gpus"] + decode["gpus"]
    assert plan["dollars_per_hour"] == plan["gpus"] * 2.5
    # GPUs of a side, for as long as the trace lasts, over its tokens
    hours = found["trace"]["seconds"] / 3600
    millions = found["trace"]["prompt_tokens"] / 1e6
    assert plan["dollars_per_million"]["input"] == pytest.approx(
        prefill["gpus"] * 2.5 * hours / millions
    )
    assert found["if_quick"]["gpus"] <= plan["gpus"] <= found["if_slow"]["gpus"]
    assert found["published_over_modelled"]["p10"] < 1 < found["published_over_modelled"]["p90"]
    assert decode in found["decode_sizes"]
    assert found["limits"] == {"ttft_s": 2.0, "tpot_s": 0.08, "percentile": 99.0}


def test_the_price_changes_nothing_but_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    cheap, dear = (planned(capsys, price=price) for price in ("1", "3"))
    assert cheap["plan"]["gpus"] == dear["plan"]["gpus"]
    for side in ("input", "output"):
        prices = [found["plan"]["dollars_per_million"][side] for found in (cheap, dear)]
        assert prices[1] == pytest.approx(3 * prices[0])


def test_choices_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, ep="32", prefill_ep="16", mtp="2", acceptance="0.5", kv_dtype="bf16")
    assert found["plan"]["prefill"]["ep"] == 16
    assert [pool["ep"] for pool in found["decode_sizes"]] == [32]
    assert found["plan"]["decode"]["mtp"] == 2
    assert found["plan"]["decode"]["tokens_per_step"] == 1.75
    assert found["kv"] == "bf16"


def test_tight_limits_make_drafts_and_wide_groups_pay(capsys: pytest.CaptureFixture[str]) -> None:
    loose, tight = (planned(capsys, slo=f"ttft=2s,tpot={ms}ms")["plan"]["decode"] for ms in (80, 8))
    assert loose["ep"] == 8
    assert tight["ep"] > 8
    assert tight["mtp"] > loose["mtp"]


def test_recorded_loads_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps([[1] * 256]))
    even = planned(capsys, expert_loads=str(loads), ep="144")
    drawn = planned(capsys, ep="144")
    assert even["plan"]["decode"]["tpot_s"] <= drawn["plan"]["decode"]["tpot_s"]
    loads.write_text("[[1, 2]]")
    assert "layer 0 is not a list of 256 counts" in refused(capsys, expert_loads=str(loads))


def test_without_rebalancing_steps_are_longer(capsys: pytest.CaptureFixture[str]) -> None:
    usual = planned(capsys, ep="32")["plan"]["decode"]
    assert main.main([*argv(ep="32"), "--no-rebalancing", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["plan"]["decode"]
    assert plain["experts_per_gpu"] == 8 < usual["experts_per_gpu"] == 9


def test_the_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "plan.png"
    assert main.main(argv(picture=str(file))) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "--picture" in refused(capsys, picture=str(blocked / "plan.png"))


def test_the_preset_is_one_that_the_simulator_takes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    preset, trace = tmp_path / "worker.json", tmp_path / "t.csv"
    assert main.main(argv(preset=str(preset), ep="32", mtp="1")) == 0
    written = json.loads(preset.read_text())
    assert written["configuration"]["expert_parallel"] == 32
    assert written["accepted"] == 1.7
    trace.write_text("timestamp_ms,input_length,output_length\n0,512,64\n")
    capfd.readouterr()
    assert (
        main.main(["sim", str(trace), "--preset", str(preset), "--workers", "2", "--json", "-"])
        == 0
    )
    report = json.loads(capfd.readouterr().out)
    assert report["completion_tokens"] == 64
    missing = tmp_path / "no" / "folder.json"
    assert main.main(argv(preset=str(missing))) == EXIT_USAGE
    assert "--preset" in capfd.readouterr().err


def test_the_planned_fleet_keeps_its_limits_in_the_simulator(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other code, in Rust: the router's placement, and workers that batch row by row and wait for no other rank."""
    lengths, preset = tmp_path / "tau.csv", tmp_path / "worker.json"
    rows = [f"{1e3 * one.at_s},{one.prompt},{one.answer}" for one in read_trace(TAU).requests]
    # without block ids nothing is cached, as in the plan
    lengths.write_text("\n".join(["timestamp_ms,input_length,output_length", *rows]))
    asked = argv(trace=str(lengths), speed="10", ep="8", prefill_ep="8", preset=str(preset))
    assert main.main([*asked, "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)["plan"]
    pools = [f"--{pool}={plan[pool]['gpus']}" for pool in ("prefill", "decode")]
    fleet = ["sim", str(lengths), f"--preset={preset}", "--speed=10", *pools, "--json=-"]
    assert main.main(fleet) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["errors"] == 0
    ttft_s, tpot_s = (report[key]["p99"] / 1e3 for key in ("ttft_ms", "tpot_quantiles_ms"))
    # ranks of a group wait for each other in the plan alone, so its times are the longer ones
    assert 0.5 * plan["prefill"]["ttft_s"] < ttft_s < plan["prefill"]["ttft_s"] < 2
    assert 0.5 * plan["decode"]["tpot_s"] < tpot_s < plan["decode"]["tpot_s"] < 0.08


def test_a_picture_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # what other tests have imported would still be found
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main.main(argv(picture=str(tmp_path / "plan.png"))) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert said == (
        "headrace plan: matplotlib is not installed; run: pip install 'headrace[bench]'\n"
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"gpu": "h20O"}, "did you mean h20?"),
        ({"gpu": "gb20"}, "did you mean gb200?"),
        ({"gpu": "tpu"}, "'tpu' is not one of h100, h800, h200, h20, b200, gb200, gb300"),
        ({"gpu": None}, "--gpu is missing"),
        ({"trace": None}, "--trace is missing"),
        ({"slo": None}, "--slo is missing"),
        ({"price": None}, "--price is missing"),
        ({"trace": "/no/such/file"}, "there is no file"),
        ({"slo": "ttft=2s"}, "tpot is missing; write both, such as ttft=2s,tpot=80ms"),
        ({"slo": ""}, "neither ttft=TIME nor tpot=TIME"),
        ({"slo": "ttft=2s,tpot"}, "'tpot' is neither"),
        ({"slo": "ttft=2s,e2e=1s"}, "'e2e=1s' is neither"),
        ({"slo": "ttft=2s,ttft=2s"}, "ttft is given twice"),
        ({"slo": "ttft=2,tpot=80ms"}, "'ttft=2' has no unit"),
        ({"slo": "ttft=-2s,tpot=80ms"}, "is not a time"),
        ({"slo": "ttft=0s,tpot=80ms"}, "a limit is above 0"),
        ({"slo": "ttft=nans,tpot=80ms"}, "is not a time"),
        ({"price": "-1"}, "'-1' is not a number above 0"),
        ({"price": "0"}, "'0' is not a number above 0"),
        ({"price": "nan"}, "'nan' is not a number"),
        ({"price": "1e3"}, "'1e3' is not a number"),
        ({"speed": "0"}, "'0' is not a number above 0"),
        ({"speed": "-2"}, "'-2' is not a number"),
        ({"hit_rate": "1.5"}, "'1.5' is not a number from 0 to 1"),
        ({"percentile": "101"}, "'101' is not a number above 0 to 100"),
        ({"acceptance": "2"}, "'2' is not a number from 0 to 1"),
        ({"ep": "12"}, "'12' is not one of 8, 16, 24"),
        ({"ep": "8,"}, "'' is not one of 8, 16, 24"),
        ({"mtp": "4"}, "'4' is neither auto nor a number from 0 to 3"),
        ({"kv_dtype": "fp16"}, "'fp16' is not one of fp8, bf16"),
        ({"picture": "plan.jpg"}, "the name has to end in .png"),
    ],
)
def test_wrong_flags_are_named(
    changed: dict[str, str | None], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, **changed)


def test_a_flag_that_is_not_there_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --price?" in refused(capsys, "--prize=2")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"slo": "ttft=10ms,tpot=80ms"}, "ttft=10ms cannot be met: one GPU computes"),
        ({"slo": "ttft=2s,tpot=100ms", "percentile": "100", "hit_rate": "0"}, None),
        ({"slo": "ttft=2s,tpot=1ms"}, "tpot=1ms cannot be met: rows take longer"),
        ({"gpu": "h100", "ep": "8"}, "DeepSeek-R1 does not fit h100 with EP8"),
    ],
)
def test_what_cannot_be_is_said(
    changed: dict[str, str | None], why: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if why is None:
        planned(capsys, **changed)
        return
    assert refused(capsys, **changed).startswith(f"headrace plan: {why}")


def test_the_best_within_reach_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for limit, other in (("ttft=10ms", "tpot=80ms"), ("tpot=1ms", "ttft=2s")):
        said = refused(capsys, slo=f"{limit},{other}")
        best = said.rpartition("within reach is ")[2]
        assert planned(capsys, slo=f"{best},{other}")["plan"]["gpus"] > 0


def test_bad_traces_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    for text, why in (("", "the trace is empty"), ("{}", "t.jsonl:1: `timestamp` is missing")):
        file.write_text(text)
        assert refused(capsys, trace=str(file)).endswith(why)


def test_more_traffic_than_can_be_planned_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "slow the trace down with --speed" in refused(capsys, speed="1000000")
