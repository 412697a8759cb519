"""The shape of the Python packages, read from their code: who imports whom, and what a type name stands for."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "headrace": ROOT / "pyworkers/headrace",
    "headrace_kernels": ROOT / "kernels/headrace_kernels",
}
ROUTER = ROOT / "router/src"
NATIVE = "headrace._core"
MOST_FILES = 16
# Forms of one thing on two sides of a seam.
SAME_NAME: dict[str, int] = {}


def modules() -> dict[str, ast.Module]:
    """Every module of both packages by its name."""
    found: dict[str, ast.Module] = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


def at_run_time(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Imports that happen when a module is loaded: neither inside of functions nor for type checkers alone."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found += at_run_time(node)
    return found


def loaded(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Imports that happen at some time, in functions too: all but those for type checkers alone."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            found += loaded(node)
    return found


def every(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """All imports, wherever they stand."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def targets(nodes: list[ast.Import | ast.ImportFrom]) -> set[str]:
    """Modules of ours that these statements load."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES or name == NATIVE else base for name in names]
        found.update(name for name in names if name in MODULES or name == NATIVE)
    return found


def related(a: str, b: str) -> bool:
    """One is the other's parent."""
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")


def test_no_module_imports_itself_by_a_detour() -> None:
    edges = {
        name: {to for to in targets(at_run_time(tree)) if not related(name, to)}
        for name, tree in MODULES.items()
    }
    state: dict[str, bool] = {}  # true while its imports are followed
    trail: list[str] = []

    def follow(name: str) -> None:
        if name in state:
            assert not state[name], f"a circle: {' -> '.join([*trail[trail.index(name) :], name])}"
            return
        state[name] = True
        trail.append(name)
        for to in sorted(edges.get(name, ())):
            follow(to)
        trail.pop()
        state[name] = False

    for name in sorted(edges):
        follow(name)


def room(module: str) -> str:
    """`headrace.engine.step.forward` is in the room `engine`, `headrace.errors` is its own."""
    package, *rest = module.split(".")
    return rest[0] if package == "headrace" and rest else package


def said(language: str) -> dict[str, set[str]]:
    """The block of ARCHITECTURE.md that says which rooms need which others."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    block = re.search(rf"```deps-{language}\n(.*?)```", text, re.DOTALL)
    assert block is not None, language
    lines = [line.split(" ->") for line in block[1].splitlines()]
    return {room: {to for to in others.strip().split(", ") if to} for room, others in lines}


def test_rooms_of_python_import_each_other_as_the_architecture_says() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in MODULES.items():
        found[room(name)].update(room(to) for to in targets(loaded(tree)))
    rooms = said("python")
    assert {name: found[name] - {name} for name in rooms} == rooms
    small = {
        "errors",
        "settings",
        "logs",
        "version",
        "host_memory",
        "exit_status",
        "extras",
        "_core",
        "__main__",
        "headrace",
    }
    assert set(found) <= set(rooms) | small, "a room that the architecture does not name"


def test_rooms_of_rust_use_each_other_as_the_architecture_says() -> None:
    source = ROOT / "router/src"
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in source.rglob("*.rs"):
        place = path.relative_to(source)
        if "tests" in place.parts or place.stem in ("tests", "fuzz", "properties"):
            continue
        code = re.split(r"#\[cfg\(test\)\]\s*mod tests \{", path.read_text())[0]
        used = re.findall(r"\bcrate::(\w+)", re.sub(r"//.*", "", code))
        found[place.parts[0].removesuffix(".rs")].update(used)
    rooms = said("rust")
    assert {name: found[name] - {name} for name in rooms} == rooms
    # `lib` and `main` put the rooms together; graphlib raises for a circle
    TopologicalSorter({name: found[name] - {name} for name in found}).prepare()


def test_kernels_know_nothing_of_workers() -> None:
    for name, tree in MODULES.items():
        if name.startswith("headrace_kernels"):
            above = {to for to in targets(every(tree)) if not to.startswith("headrace_kernels")}
            assert above <= {NATIVE, "headrace"}, f"{name} imports {above}"


def test_a_public_type_name_stands_for_one_thing() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    twice = {name: where for name, where in places.items() if len(where) > SAME_NAME.get(name, 1)}
    assert not twice


def test_a_type_name_of_the_router_stands_for_one_thing() -> None:
    declared = re.compile(
        r"^ *pub(?:\([a-z: ]+\))? (?:struct|enum|trait|type|union) (\w+)", re.MULTILINE
    )
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in ROUTER.rglob("*.rs"):
        if path.name != "tests.rs" and "tests" not in path.parts:
            for name in declared.findall(path.read_text()):
                places[name].append(str(path.relative_to(ROUTER)))
    assert len(places) > 300, "types are found"
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize("package", FOLDERS)
def test_rooms_are_small_enough_to_look_around_in(package: str) -> None:
    folders = [FOLDERS[package], *(p for p in FOLDERS[package].rglob("*") if p.is_dir())]
    for folder in folders:
        count = sum(
            path.suffix == ".py" and path.name != "__init__.py" for path in folder.iterdir()
        )
        assert count <= MOST_FILES, f"{folder.relative_to(ROOT)} has {count} modules"


CRATES = ("router", "bench", "bindings", "kernels/native")
# Folders that hold more, and how many: none of them may grow.
LARGER_FOLDERS = {"router/src": 19}


@pytest.mark.parametrize("crate", CRATES)
def test_folders_of_rust_are_small_enough_to_look_around_in(crate: str) -> None:
    source = ROOT / crate / "src"
    for folder in [source, *(path for path in source.rglob("*") if path.is_dir())]:
        names = [path.stem for path in folder.iterdir() if path.suffix == ".rs"]
        count = len([name for name in names if name not in ("lib", "main", "tests")])
        place = folder.relative_to(ROOT).as_posix()
        most = LARGER_FOLDERS.get(place, MOST_FILES)
        assert count <= most, f"{place} has {count} files"


def test_folders_of_tests_are_small_enough_to_look_around_in() -> None:
    tests = ROOT / "tests"
    for folder in [tests, *(path for path in tests.rglob("*") if path.is_dir())]:
        count = len([path for path in folder.iterdir() if path.suffix in (".py", ".rs", ".json")])
        assert count <= MOST_FILES, f"{folder.relative_to(ROOT)} has {count} files"
