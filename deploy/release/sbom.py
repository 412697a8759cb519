"""What a release is made of, as CycloneDX 1.6: the crates of the router by `cargo metadata`, and the Python packages of
an extra by what is installed. `python -m deploy.release.sbom --out FILE` from the root of the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parents[2]
Component = dict[str, Any]


class SbomError(Exception):
    """It cannot be said what the release is made of; the message says what to do."""


def licences(expression: str | None) -> list[dict[str, Any]]:
    """As CycloneDX has them: an expression of SPDX, or a text that is none."""
    if not expression:
        return []
    text = " ".join(expression.replace("/", " OR ").split())  # as old crates write it
    is_spdx = re.fullmatch(
        r"\(?[A-Za-z0-9.+-]+(?: (?:OR|AND|WITH) \(?[A-Za-z0-9.+-]+\)?)*\)?", text
    )
    if is_spdx:
        return [{"expression": text}]
    return [{"license": {"name": text[:200]}}]


def component(kind: str, name: str, version: str, licence: str | None) -> Component:
    purl = f"pkg:{kind}/{quote(name)}@{quote(version)}"
    found: Component = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    if known := licences(licence):
        found["licenses"] = known
    return found


def cargo_metadata(package: str) -> dict[str, Any]:
    """What cargo resolves for this machine, without the network where the crates are here."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    host = re.search(r"^host: (\S+)$", run(["rustc", "--version", "--verbose"]), re.MULTILINE)
    if host is not None:
        command += ["--filter-platform", host[1]]
    found: dict[str, Any] = json.loads(run(command))
    if package not in {one["name"] for one in found["packages"]}:
        raise SbomError(f"{package} is no crate of this workspace")
    return found


def run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise SbomError(f"{command[0]} was not found; install Rust") from error
    except subprocess.CalledProcessError as error:
        raise SbomError(f"{' '.join(command)}: {error.stderr.strip()[-300:]}") from error
    return done.stdout


def crates(found: dict[str, Any], package: str) -> tuple[list[Component], dict[str, list[str]]]:
    """The crates that are linked into `package`, without it, and who needs whom. Build and test crates are left out."""
    packages = {one["id"]: one for one in found["packages"]}
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    (start,) = [key for key, one in packages.items() if one["name"] == package]
    checksums = lock_checksums((ROOT / "Cargo.lock").read_text())

    def needs(key: str) -> list[str]:
        return [
            dep["pkg"]
            for dep in nodes[key]["deps"]
            if any(kind["kind"] is None for kind in dep["dep_kinds"])
        ]

    def reference(key: str) -> str:
        one = packages[key]
        return f"pkg:cargo/{quote(one['name'])}@{quote(one['version'])}"

    components: list[Component] = []
    dependencies: dict[str, list[str]] = {}
    todo, seen = [start], {start}
    while todo:
        key = todo.pop()
        dependencies[reference(key)] = sorted({reference(other) for other in needs(key)})
        if key != start:
            one = packages[key]
            entry = component("cargo", one["name"], one["version"], one["license"])
            if checksum := checksums.get((one["name"], one["version"])):
                entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
            components.append(entry)
        for other in needs(key):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return components, dependencies


def lock_checksums(text: str) -> dict[tuple[str, str], str]:
    packages = tomllib.loads(text)["package"]
    return {(one["name"], one["version"]): one["checksum"] for one in packages if "checksum" in one}


def python_packages(requirements: Iterable[str], extras: set[str]) -> list[Component]:
    """Those that the requirements need, as they are installed here."""
    from packaging.requirements import Requirement

    found: dict[str, Component] = {}
    todo = [(Requirement(text), extras) for text in requirements]
    while todo:
        wanted, of_extras = todo.pop()
        applies = [{"extra": extra} for extra in of_extras] or [{"extra": ""}]
        if wanted.marker is not None and not any(wanted.marker.evaluate(one) for one in applies):
            continue
        try:
            there = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError as error:
            raise SbomError(f"{wanted.name} is not installed here: make setup") from error
        name = re.sub(r"[-_.]+", "-", there.metadata["Name"]).lower()
        if name in found:
            continue
        licence = there.metadata["License-Expression"] or there.metadata["License"]
        found[name] = component("pypi", name, there.version, licence)
        todo += [(Requirement(text), set(wanted.extras)) for text in there.requires or []]
    return sorted(found.values(), key=lambda one: str(one["bom-ref"]))


def document(
    name: str, version: str, components: list[Component], dependencies: dict[str, list[str]]
) -> dict[str, Any]:
    """The inventory. Its serial number follows from its content, so that the same release has the same one."""
    top = f"pkg:generic/{quote(name)}@{quote(version)}"
    known = {one["bom-ref"] for one in components}
    body: dict[str, Any] = {
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": top,
                "name": name,
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
            },
            "tools": {
                "components": [{"type": "application", "name": "headrace deploy.release.sbom"}]
            },
        },
        "components": sorted(components, key=lambda one: str(one["bom-ref"])),
        "dependencies": [
            {"ref": top, "dependsOn": sorted(known)},
            *(
                {"ref": ref, "dependsOn": [other for other in needs if other in known]}
                for ref, needs in sorted(dependencies.items())
                if ref in known
            ),
        ],
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    serial = uuid.uuid5(uuid.NAMESPACE_URL, digest)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **body,
    }


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def required(about: dict[str, Any], extra: str) -> list[str]:
    """What an extra asks for, with that of the extras of ours that it names."""
    found: list[str] = []
    own = f"{about['name']}["
    for text in about["optional-dependencies"][extra]:
        if text.startswith(own):
            found += [
                one for name in text[len(own) : -1].split(",") for one in required(about, name)
            ]
        else:
            found.append(text)
    return found


def inventory(extra: str | None = None) -> dict[str, Any]:
    """Of the wheel with the router in it; with an extra, of what that installs besides."""
    about = project()
    components, dependencies = crates(cargo_metadata("headrace-bindings"), "headrace-bindings")
    requirements = list(about["dependencies"])
    if extra is not None:
        requirements += required(about, extra)
    components += python_packages(requirements, set() if extra is None else {extra})
    return document("headrace", about["version"], components, dependencies)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(". ")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extra", help="include what this extra of pyproject.toml installs")
    flags = parser.parse_args()
    try:
        text = json.dumps(inventory(flags.extra), indent=1) + "\n"
    except SbomError as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 1
    flags.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
