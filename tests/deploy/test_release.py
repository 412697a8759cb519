"""What a release says that it is made of, and what it makes of the machine that it is built on."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

from deploy.release import build, sbom
from helpers.require import needs

SCHEMAS = Path(__file__).parent / "schemas"
SCHEMA: dict[str, Any] = json.loads((SCHEMAS / "cyclonedx-1.6.json").read_text())
MATURIN = Path(sys.executable).with_name("maturin")
needs_cargo = needs("cargo", "there is no cargo", here=shutil.which("cargo") is not None)


def validator() -> jsonschema.Draft7Validator:
    spdx = json.loads((SCHEMAS / "spdx-licences.json").read_text())
    anything: dict[str, Any] = {"definitions": {"signature": {}}}  # no inventory of ours is signed
    registry: Registry[Any] = Registry().with_resources(
        [
            ("http://cyclonedx.org/schema/spdx.SNAPSHOT.schema.json", of_draft7(spdx)),
            ("http://cyclonedx.org/schema/jsf-0.82.SNAPSHOT.schema.json", of_draft7(anything)),
        ]
    )
    return jsonschema.Draft7Validator(SCHEMA, registry=registry)


def of_draft7(schema: dict[str, Any]) -> Resource[Any]:
    named = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
    return Resource.from_contents(named)


@pytest.fixture(scope="module")
def of_worker() -> dict[str, Any]:
    return sbom.inventory("worker")


@needs_cargo
def test_the_inventory_fits_the_schema_of_cyclonedx(of_worker: dict[str, Any]) -> None:
    assert [error.message for error in validator().iter_errors(of_worker)] == []


@needs_cargo
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("components", 0, "type"), "crate"),
        (("components", 0, "hashes"), [{"alg": "SHA-256", "content": "short"}]),
        (("components", 0, "nonsense"), 1),
        (("serialNumber",), "1"),
    ],
)
def test_an_inventory_that_is_wrong_does_not(
    of_worker: dict[str, Any], path: tuple[str | int, ...], value: Any
) -> None:
    wrong: Any = json.loads(json.dumps(of_worker))
    inside = wrong
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    assert not validator().is_valid(wrong)


@needs_cargo
def test_it_names_what_is_linked_with_checksums_and_what_python_has(
    of_worker: dict[str, Any],
) -> None:
    found = {one["purl"].partition("@")[0]: one for one in of_worker["components"]}
    assert {"pkg:cargo/tokio", "pkg:cargo/hyper", "pkg:cargo/pyo3"} <= set(found)
    assert found["pkg:cargo/tokio"]["hashes"][0]["alg"] == "SHA-256"
    assert "hashes" not in found["pkg:cargo/headrace-router"], "of this workspace"
    assert found["pkg:pypi/torch"]["version"] == metadata.version("torch")
    tests_alone = {"pkg:cargo/proptest", "pkg:pypi/pytest", "pkg:pypi/ruff", "pkg:cargo/criterion"}
    assert not tests_alone & set(found)
    references = {one["bom-ref"] for one in of_worker["components"]}
    for one in of_worker["dependencies"]:
        assert set(one["dependsOn"]) <= references


@needs_cargo
def test_the_base_install_has_one_python_package_and_the_same_inventory_each_time() -> None:
    first, second = sbom.inventory(), sbom.inventory()
    assert first == second
    python = [one["name"] for one in first["components"] if one["purl"].startswith("pkg:pypi/")]
    assert python == ["msgpack"]
    assert first["serialNumber"] != sbom.inventory("worker")["serialNumber"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MIT OR Apache-2.0", [{"expression": "MIT OR Apache-2.0"}]),
        ("MIT/Apache-2.0", [{"expression": "MIT OR Apache-2.0"}]),
        ("Apache-2.0  OR  MIT", [{"expression": "Apache-2.0 OR MIT"}]),
        (
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            [{"expression": "(MIT OR Apache-2.0) AND Unicode-3.0"}],
        ),
        (
            "Copyright (c) 2005, Somebody. All rights",
            [{"license": {"name": "Copyright (c) 2005, Somebody. All rights"}}],
        ),
        ("", []),
        (None, []),
    ],
)
def test_licences_are_expressions_or_texts(text: str | None, expected: list[Any]) -> None:
    assert sbom.licences(text) == expected


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(sbom.SbomError, match="no-such-package-here is not installed"):
        sbom.python_packages(["no-such-package-here>=1"], set())
    marked = ["no-such-package-here; python_version < '3'", "no-such; extra == 'other'"]
    assert sbom.python_packages(marked, {"worker"}) == []


@needs_cargo
def test_a_crate_that_is_none_is_named() -> None:
    with pytest.raises(sbom.SbomError, match="no-such-crate is no crate"):
        sbom.cargo_metadata("no-such-crate")


def test_sums_are_as_sha256sum_reads_them(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "SHA256SUMS").write_text("old")
    text = build.sums(tmp_path)
    assert [line.split("  ")[1] for line in text.splitlines()] == ["a.txt", "b.txt"]
    assert text.startswith(hashlib.sha256(b"a").hexdigest())


@needs_cargo
def test_a_machine_that_cannot_be_built_for_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.MACHINES, "pdp11", "pdp11-unknown-linux-gnu")
    assert build.why_not("pdp11", "pdp11") is None
    reason = build.why_not("pdp11", "x86_64")
    assert reason is not None and "rustup target add pdp11-unknown-linux-gnu" in reason


def test_a_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(build.ReleaseError, match="no such luck"):
        build.run(sys.executable, "-c", "raise SystemExit('no such luck')")


def test_a_program_that_does_not_start_is_no_release(tmp_path: Path) -> None:
    program = tmp_path / "headrace-router"
    program.write_text("#!/bin/sh\necho 'cannot listen'\n")
    program.chmod(0o755)
    with pytest.raises(build.ReleaseError, match="cannot listen"):
        build.start_ms(program)


@pytest.mark.slow
@needs_cargo
@needs("maturin", "there is no maturin beside this Python", here=MATURIN.exists())
@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    build.run(MATURIN, "build", "--profile", "dev", "--locked", "--out", wheels)
    (wheel,) = wheels.glob("*-abi3-*.whl")
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    # msgpack is taken from here: a test reaches no network
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    shutil.copytree(
        Path(str(metadata.distribution("msgpack").locate_file("msgpack"))), site / "msgpack"
    )
    build.run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    version = build.run(tmp_path / "venv/bin/headrace", "version", env={"PYTHONPATH": ""})
    assert version.split()[-1] == sbom.project()["version"]
