"""`headrace serve` takes the flags of router and workers, checks them before anything starts, and hands them on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace import _core
from headrace.cli import main
from headrace.cli.serving import commands
from headrace.cli.serving.config import ServeSettings, free_address
from headrace.settings import router
from headrace.settings.fleet import FLEET_FLAGS
from headrace.settings.table import Flag, Typed, typed
from headrace.settings.worker import WORKER_FLAGS, worker_argv

ROUTER = router.router_flags()
ITS_OWN = (
    "--port",
    "--worker-listen",
    "--worker-socket",
    "--config",
)  # of which `serve` makes something
SECRETS = ("HEADRACE_SECRET", "HEADRACE_API_KEY", "HEADRACE_ADMIN_KEY", "HEADRACE_LOG")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)


def given(*argv: str) -> Typed:
    return typed(main.make_parser("serve").parse_args(["serve", *argv]))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the person sees. Nothing may have been started."""
    try:
        status = main.main(list(argv))
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    return capsys.readouterr().err


def value(flag: Flag, folder: Path) -> str:
    """A value that the router takes."""
    if flag.choices:
        return flag.choices[-1]
    if flag.value == "FILE":
        path = folder / flag.name
        path.write_text(f"key-of-{flag.name}\n")
        path.chmod(0o600)
        return str(path)
    known = {"--host": "localhost", "--shadow": "round-robin", "--log-level": "debug"}
    known |= {"--decision-log": str(folder / "log"), "--queue-floors": "0.4,0.3,0.1"}
    known |= {"--register": "etcd:e:2379/p", "--advertise": "h:1", "--admin-listen": "unix:/a"}
    known |= {"--otlp-endpoint": "http://c:4318"}
    known |= {"--worker-listen": "unix:/w", "--allowed-origins": "https://a", "--policy": "kv"}
    return known.get(flag.name) or flag.default or "h"


NEEDS = {
    "--admin-listen-only": "--admin-listen",
    "--worker-tls-cert": "--worker-tls-key",
    "--worker-tls-key": "--worker-tls-cert",
    "--register": "--advertise",
    "--advertise": "--register",
    "--tls-cert": "--tls-key",
    "--tls-key": "--tls-cert",
    "--tls-client-ca": "--tls-cert --tls-key",
    "--worker-tls-client-ca": "--worker-tls-cert --worker-tls-key",
}


@pytest.mark.parametrize("name", [name for name in ROUTER if name not in ITS_OWN])
def test_every_flag_of_the_router_passes_through_serve(name: str, tmp_path: Path) -> None:
    names = [name, *NEEDS.get(name, "").split()]
    flags = [
        one if ROUTER[one].value is None else f"{one}={value(ROUTER[one], tmp_path)}"
        for one in names
    ]
    kept = given(*flags)
    router.check_router(kept, "headrace serve")
    assert sorted(kept.argv(router.handed_on())) == sorted(flags), "as they were typed"


def test_of_what_serve_chooses_itself_the_router_is_told_nothing_twice() -> None:
    kept = given("--port=1", "--worker-listen=unix:/w", "--policy=kv")
    assert kept.argv(router.handed_on()) == ["--policy=kv"]


def test_flags_that_may_be_repeated_are_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--admin-listen=unix:/a", "--admin-listen=unix:/b", "--allowed-hosts=a,b"]
    assert given(*flags).argv(router.handed_on()) == flags
    assert "--policy: it was given twice" in refused(
        capsys, "serve", "--policy=kv", "--policy", "kv"
    )


def test_two_sides_share_a_few_flags_and_the_rest_is_of_one() -> None:
    of_worker = {flag.name for flag in WORKER_FLAGS.values()}
    of_fleet = {flag.name for flag in FLEET_FLAGS.values()}
    shared = {"--secret-file", "--log-level", "--log-format", "--log-requests-per-s"}
    shared |= {"--otlp-endpoint"}
    assert of_worker & ROUTER.keys() == shared
    assert not of_fleet & (of_worker | ROUTER.keys())
    names = [flag.name for flag in main.serve_flags()]
    assert len(names) == len(set(names))


def test_what_both_sides_need_is_given_once(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("eight bytes\n")
    args = main.make_parser("serve").parse_args(
        ["serve", f"--secret-file={secret}", "--log-level=debug", "--log-format=json"]
    )
    both = [f"--secret-file={secret}", "--log-level=debug", "--log-format=json"]
    assert sorted(worker_argv(args)) == sorted(both)
    assert sorted(typed(args).argv(router.handed_on())) == sorted(both)
    assert router.workers_know(typed(args)), "so that serve makes up none"


def test_the_secret_of_serve_is_its_own_unless_one_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not router.workers_know(given())
    assert not router.workers_know(given("--allow-anonymous-workers")), "of which there are none"
    assert not router.workers_know(given("--worker-listen=unix:/w"))
    assert router.workers_know(given("--worker-listen=unix:/w", "--allow-anonymous-workers"))
    assert router.workers_know(given("--worker-listen=unix:/w", "--worker-tls-client-ca=ca"))
    monkeypatch.setenv("HEADRACE_SECRET", "of the environment")
    assert router.workers_know(given())


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--polcy=kv"], "unrecognized arguments: --polcy; did you mean --policy?"),
        (["--policy=kvv"], "did you mean kv?"),
        (["--policy"], "expected one argument"),
        (["--port=70000"], "70000 is not in 0..=65535"),
        (["--port=many"], "invalid value 'many'"),
        (["--max-streams=-1"], "invalid digit"),
        (["--heartbeat-ms=0"], "--heartbeat-ms: is 0"),
        (["--heartbeat-ms=4000"], "more than three heartbeats"),
        (["--worker-tls-cert=x.pem"], "--worker-tls-key: is missing"),
        (["--register=etcd:e:2379/p"], "--advertise: is missing"),
        (["--worker-listen=unix:/w"], "must know a secret"),
        (["--worker-listen=0.0.0.0:0"], "workers need no secret"),
        (["--worker-listen=8001"], "is not an address"),
        (["--secret-file=/nonexistent"], "--secret-file: cannot read"),
        (["--log-level=loud"], "--log-level: 'loud' is not a level"),
        (["--worker-socket=/s"], "--worker-socket is a flag of `headrace router`"),
        (["--role=prefill"], "--role is a flag of `headrace worker`"),
        (["--router-args", "--policy kv"], "give the router's flags directly, as in --policy kv"),
        (["--router-args=--policy kv"], "give the router's flags directly, as in --policy kv"),
        (["--drain-timeout", "5"], "give --drain-timeout-ms, in milliseconds"),
        (["--workers=0"], "'0' is not a whole number from 1 to 1024"),
        (["--workers=2", "--prefill=1", "--decode=1"], "take one or the other"),
        (["--prefill=1"], "--prefill needs --decode"),
        (["--mtp-fixed"], "--mtp-fixed needs --mtp TOKENS"),
        ([f"--host={'x' * 100_000}"], "an argument has 100007 bytes"),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_told_with_the_usage_of_serve(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "serve", *argv)
    assert why in error
    assert "sage: headrace serve [FLAGS] [MODEL]\n" in error
    assert len(error) < 700


def test_a_secret_is_not_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv in (["--secret=sesame"], ["--api-key", "sesame"], ["--sercet=sesame"]):
        assert "sesame" not in refused(capsys, "serve", *argv)
    monkeypatch.setenv("HEADRACE_SECRET", "sesame")
    error = refused(capsys, "serve")
    assert "HEADRACE_SECRET: the secret has 6 bytes" in error
    assert "sesame" not in error


@pytest.mark.parametrize(
    ("command", "flag", "owners"),
    [
        ("worker", "--policy", "`headrace serve` and `headrace router`"),
        ("worker", "--worker-socket", "`headrace router`"),
        ("worker", "--prefill", "`headrace serve`"),
        ("router", "--dtype", "`headrace serve` and `headrace worker`"),
        ("router", "--role", "`headrace worker`"),
    ],
)
def test_flags_of_the_other_side_are_told_their_place(
    command: str, flag: str, owners: str, capfd: pytest.CaptureFixture[str]
) -> None:
    told = main.elsewhere(command, [flag])
    assert told == f"; {flag} is a flag of {owners}"
    if command == "worker":
        with pytest.raises(SystemExit):
            main.main([command, flag])
        error = capfd.readouterr().err
        assert error.startswith("usage: headrace worker [FLAGS] [MODEL]\n")
        assert told in error


def test_a_flag_of_its_own_has_no_other_place(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main.elsewhere("router", ["--policy", "--mtp"])
        == "; --mtp is a flag of `headrace serve` and `headrace worker`"
    )
    assert main.main(["router", "--policy=nonsense"]) == 2
    assert "is a flag of" not in capfd.readouterr().err


def test_serve_without_flags_is_one_worker_at_a_private_socket() -> None:
    kept = given()
    router.check_router(kept, "headrace serve")
    assert kept.argv(router.handed_on()) == []
    assert router.value_of(kept, "--port") == "8000"
    config = ServeSettings(
        host="127.0.0.1",
        port=8000,
        roles=("both",),
        model=None,
        worker_argv=[],
        router_argv=[],
        drain_timeout_s=30,
    )
    assert commands.worker_addresses(config, Path("/f/s")) == ["--worker-listen=unix:/f/s"]


def test_other_workers_have_an_address_beside_the_private_socket() -> None:
    config = ServeSettings(
        host="127.0.0.1",
        port=8000,
        roles=("both",),
        model=None,
        worker_argv=[],
        router_argv=[],
        drain_timeout_s=30,
        worker_listen="10.0.0.1:8001",
    )
    addresses = commands.worker_addresses(config, Path("/f/s"))
    assert addresses == ["--worker-listen=10.0.0.1:8001", "--worker-socket=/f/s"]
    _core.check_router([*addresses, "--allow-anonymous-workers"], "headrace serve")


def test_a_free_port_is_found_for_workers_too() -> None:
    assert free_address("unix:/a/b") == "unix:/a/b"
    host, _, port = free_address("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0
    assert os.environ.get("HEADRACE_SECRET") is None
