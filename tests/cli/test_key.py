"""`headrace key new`: the key, and the line that stands for it."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from headrace import _core
from headrace.cli import main
from headrace.errors import ConfigError


def test_a_key_is_drawn_with_the_line_that_a_router_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["ci", "--tenant", "alice", "--models", "a,b", "--rpm", "60", "--tpm", "1000"]
    words += ["--streams", "8", "--expires", "2027-01-01"]
    keys: set[str] = set()
    for _ in range(2):
        assert main.main(["key", "new", *words]) == 0
        out = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        digest = hashlib.sha256(out["key"].encode()).hexdigest()
        settings = "name=ci models=a,b rpm=60 tpm=1000 streams=8 expires=2027-01-01"
        assert out["line"] == f"alice sha256:{digest} {settings}"
        assert out["key"].startswith("hr-") and len(out["key"]) == 46
        keys.add(out["key"])
    assert len(keys) == 2


def test_a_file_gets_the_line_and_only_the_key_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.txt"
    for before in (None, "other # without an end", "other\n"):
        if before is not None:
            file.write_text(before)
        assert main.main(["key", "new", "--file", str(file)]) == 0
        key = capsys.readouterr().out.strip()
        line = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
        ended = "" if before is None else before.rstrip("\n") + "\n"
        assert file.read_text() == f"{ended}{line}\n"
        assert key not in file.read_text()
        _core.check_router([f"--api-key-file={file}"], "")
    file.unlink()
    assert main.main(["key", "new", "--file", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["a/b"], "name= takes"),
        (["--rpm", "0"], "rpm= takes"),
        (["--tpm", "x"], "tpm= takes"),
        (["--expires", "soon"], "expires= takes"),
        (["--models", "a b"], "not one word"),
        (["--tenant", "#x"], "not one word"),
        (["--file", "/nonexistent/keys"], "cannot write"),
    ],
)
def test_what_a_router_would_refuse_is_refused_before_a_key_is_given(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["key", "new", *words]) == 2
    told = capsys.readouterr()
    assert part in told.err
    assert told.out == ""


def test_the_router_checks_a_line_and_shows_none_of_it() -> None:
    _core.check_key_line("alice sesame rpm=1")
    with pytest.raises(ConfigError) as refused:
        _core.check_key_line("sesame rmp=1")
    assert "sesame" not in str(refused.value)
