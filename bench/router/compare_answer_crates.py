"""How crates that tell answers apart compare with our readers: conformance, CPU time, dependencies, licences.

    python -m bench.router.compare_answer_crates --out bench/results/answer_crates.json

Writes a package of its own under target/answer_crates/, which has these crates from crates.io beside the router, builds
it, and gives it texts as models write them by their own chat templates: a call; two; arguments that look like markup;
text around a call; reasoning before it; text that only looks like a call. Each is read in every two pieces: a cut
counts if the calls, the text and the reasoning are what they are, but for white space. `ns` are of CPU time a token of
3.6 characters, the least of `rounds`, what gathers the text included.
"""

import argparse
import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.helpers.report import ROOT, rounded, write

PACKAGE = ROOT / "target" / "answer_crates"
SOURCES = Path(__file__).parent / "answer_crates"
CRATES = {
    "dynamo-parsers": "11.0.1",
    "dynamo-parsers-v2": "0.9.6",
    "tool-parser": "1.10.0",
    "reasoning-parser": "1.10.0",
}
BESIDE = {"dynamo-protocols": "10.0.0", "futures": "0.3", "cpu-time": "1", "serde_json": "1"}
# `openai-harmony` fetches its vocabulary when it first reads, and `tool-parser` leaves that form to another crate.
ABSENT = "harmony"

CITY, HARD = "Zürich", 'Zü"rich {1} </x> [2]'
BEFORE, AFTER, THOUGHT = "Let me see.\n", "\nThere you are.", "Is it (1 < 2) [so]? é"
Calls = list[tuple[str, dict[str, Any]]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Call = Callable[[int, str, dict[str, Any]], str]


def each(before: str, between: str, after: str, call: Call) -> Callable[[Calls], str]:
    """Writes calls, each by `call(index, name, arguments)`."""

    def written(calls: Calls) -> str:
        texts = [call(i, name, arguments) for i, (name, arguments) in enumerate(calls)]
        return before + between.join(texts) + after

    return written


def qwen_coder(_: int, name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(f"<parameter={key}>\n{v}\n</parameter>\n" for key, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(_: int, name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{v}</arg_value>\n" for key, v in arguments.items()
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


def pythonic(_: int, name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={v!r}' for key, v in arguments.items())})"


def gemma(_: int, name: str, arguments: dict[str, Any]) -> str:
    values = (
        f'{key}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{key}:{v}"
        for key, v in arguments.items()
    )
    return f"<|tool_call>call:{name}{{{','.join(values)}}}<tool_call|>"


def of_deepseek(text: str) -> str:
    return text.replace("<|", "<\uff5ctool▁").replace("|>", "\uff5c>")


CALLS_BEGIN, CALLS_END = of_deepseek("<|calls▁begin|>"), of_deepseek("<|calls▁end|>")
WRITERS: dict[str, Any] = {
    "hermes": each(
        *("", "\n", ""),
        lambda _, name, arguments: (
            f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'
        ),
    ),
    "qwen3-coder": each("", "\n", "", qwen_coder),
    "llama3-json": each(
        *("", "; ", ""),
        lambda _, name, arguments: f'{{"name": "{name}", "parameters": {dumps(arguments)}}}',
    ),
    "pythonic": each("[", ", ", "]", pythonic),
    "mistral (list)": each(
        *("[TOOL_CALLS] [", ", ", "]"),
        lambda _, name, arguments: f'{{"name": "{name}", "arguments": {dumps(arguments)}}}',
    ),
    "mistral (ARGS)": each(
        *("", "", ""),
        lambda _, name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}",
    ),
    "deepseek-v3": each(
        *(CALLS_BEGIN, "\n", CALLS_END),
        lambda _, name, arguments: of_deepseek(
            f"<|call▁begin|>function<|sep|>{name}\n```json\n{dumps(arguments)}\n```<|call▁end|>"
        ),
    ),
    "deepseek-v3.1": each(
        *(CALLS_BEGIN, "", CALLS_END),
        lambda _, name, arguments: of_deepseek(
            f"<|call▁begin|>{name}<|sep|>{dumps(arguments)}<|call▁end|>"
        ),
    ),
    "glm-4.5": each("", "\n", "", glm),
    "kimi-k2": each(
        *("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        lambda i, name, arguments: (
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
            f"{dumps(arguments)}<|tool_call_end|>"
        ),
    ),
    "harmony": each(
        *("", "<|start|>assistant", ""),
        lambda _, name, arguments: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{dumps(arguments)}<|call|>"
        ),
    ),
    "gemma": each("", "", "", gemma),
}
# What each crate calls the parser of calls, and that of reasoning.
NAMES: dict[str, dict[str, tuple[str, str | None]]] = {
    "hermes": {"dynamo-parsers": ("hermes", "qwen3"), "tool-parser": ("qwen", "qwen3")},
    "qwen3-coder": {
        "dynamo-parsers": ("qwen3_coder", "qwen3"),
        "dynamo-parsers-v2": ("qwen3_coder", ""),
        "tool-parser": ("qwen_coder", "qwen3"),
    },
    "llama3-json": {"dynamo-parsers": ("llama3_json", None), "tool-parser": ("llama", None)},
    "pythonic": {"dynamo-parsers": ("pythonic", None), "tool-parser": ("pythonic", None)},
    "mistral (list)": {
        "dynamo-parsers": ("mistral", "mistral"),
        "tool-parser": ("mistral", None),
    },
    "mistral (ARGS)": {
        "dynamo-parsers": ("mistral", "mistral"),
        "tool-parser": ("mistral", None),
    },
    "deepseek-v3": {
        "dynamo-parsers": ("deepseek_v3", "deepseek_v3"),
        "tool-parser": ("deepseek", "deepseek_r1"),
    },
    "deepseek-v3.1": {
        "dynamo-parsers": ("deepseek_v3_1", "deepseek_v3_1"),
        "tool-parser": ("deepseek31", "deepseek_v31"),
    },
    "glm-4.5": {
        "dynamo-parsers": ("glm47", "glm45"),
        "dynamo-parsers-v2": ("glm47", ""),
        "tool-parser": ("glm45_moe", "glm45"),
    },
    "kimi-k2": {
        "dynamo-parsers": ("kimi_k2", "kimi_k25"),
        "dynamo-parsers-v2": ("kimi_k2", ""),
        "tool-parser": ("kimik2", "kimi_k25"),
    },
    "harmony": {},
    "gemma": {
        "dynamo-parsers": ("gemma4", "gemma4"),
        "dynamo-parsers-v2": ("gemma4", ""),
        "tool-parser": ("gemma4", "gemma4"),
    },
}
ALONE = ("llama3-json", "pythonic")  # calls are all of the answer, and the models do not reason
THOUGHTS = {
    "mistral (list)": "[THINK]{}[/THINK]",
    "mistral (ARGS)": "[THINK]{}[/THINK]",
    "gemma": "<|channel>thought\n{}<channel|>",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
}
THINK = "<think>\n{}\n</think>\n\n"
# The river of bench/src: text without a marker, and a string of JSON.
WORDS = (
    "The river runs down to the mill, and the mill race (1 < 2) carries the water to the wheel.\n"
)
ESCAPED = WORDS.replace("\n", "\\n")


def case(name: str, text: str, calls: Calls, content: str = "", reasoning: str = "") -> Any:
    right = {"content": content, "reasoning": reasoning, "calls": calls}
    return {"name": name, "text": text, "reasons": bool(reasoning), **right}


def cases(form: str) -> list[Any]:
    writer = WRITERS[form]
    one, two = [("weather", {"city": CITY, "days": 3})], [("weather", {"city": "Bern", "days": 1})]
    two += [("now", {})]
    hard = [("weather", {"city": HARD, "days": 3})]
    found = [
        case("one call", writer(one), one),
        case("two calls", writer(two), two),
        case("hard arguments", writer(hard), hard),
    ]
    if form == "harmony":
        end, final = "<|end|><|start|>assistant", "<|channel|>final<|message|>"
        said = f"<|channel|>commentary<|message|>{BEFORE}{end}{writer(one)}<|start|>assistant"
        text = f"{said}{final}{AFTER}"
        found.append(case("text around", text, one, BEFORE + AFTER))
        found.append(case("no call", f"{final}[x] and {{y}} <|", [], "[x] and {y} <|"))
    elif form in ALONE:
        found.append(case("no call", "[x] is not {y}.", [], "[x] is not {y}."))
        found.append(case("no call, braces", "{y} is not [x].", [], "{y} is not [x]."))
    else:
        text = f"{BEFORE}{writer(one)}{AFTER}"
        found.append(case("text around", text, one, BEFORE + AFTER))
        opener = writer(one)[:6]
        like = f"Is 1 < 2, [x] and {{y}}, or {opener} so?"
        found.append(case("no call", like, [], like))
    if form not in ALONE:
        text = THOUGHTS.get(form, THINK).format(THOUGHT) + writer(one)
        found.append(case("reasoning", text, one, reasoning=THOUGHT))
    return found


def flowing(form: str) -> dict[str, Any]:
    """A text, and a call up to the middle of its first argument."""
    text = WRITERS[form]([("weather", {"city": "\0"})])
    head = text.partition("\\u0000" if "\\u0000" in text else "\0")[0].partition("\\x00")[0]
    final = "<|channel|>final<|message|>" if form == "harmony" else ""
    plain = form in ("qwen3-coder", "glm-4.5", "gemma")
    return {"heads": [final, head], "flows": [WORDS, WORDS if plain else ESCAPED]}


def forms() -> list[Any]:
    found: list[Any] = []
    for form in WRITERS:
        ours = form.partition(" ")[0]
        thought = None if form in ALONE else ours if form in THOUGHTS else "think"
        if form.startswith("mistral"):
            thought = "mistral"
        names = {"headrace-router": (ours, thought)} | NAMES[form]
        named = {
            crate: {"calls": calls, "reasoning": reasoning}
            for crate, (calls, reasoning) in names.items()
        }
        found.append({"form": form, "names": named, "cases": cases(form), **flowing(form)})
    return found


def write_package() -> None:
    """A package outside of the workspace: nothing of it is in our lock file."""
    lines = [
        *("[package]", 'name = "answer-crates"', 'version = "0.0.0"', 'edition = "2024"'),
        *("publish = false", "[workspace]", "[dependencies]"),
        f'headrace-router = {{ path = "{ROOT / "router"}" }}',
        'serde = { version = "1", features = ["derive"] }',
        *(f'{name} = "={version}"' for name, version in CRATES.items()),
        *(f'{name} = "{version}"' for name, version in BESIDE.items()),
        *("[[bin]]", 'name = "answer-crates"', f'path = "{SOURCES / "main.rs"}"'),
        *("[profile.release]", "debug = false", 'panic = "unwind"', 'lto = "off"'),
    ]
    PACKAGE.mkdir(parents=True, exist_ok=True)
    (PACKAGE / "Cargo.toml").write_text("\n".join(lines) + "\n")


def cargo(*arguments: str) -> str:
    """Its output; in a folder of its own, so that no other build is in the way."""
    command = ["cargo", *arguments, "--manifest-path", str(PACKAGE / "Cargo.toml")]
    env = os.environ | {"CARGO_TARGET_DIR": str(PACKAGE / "target")}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


def dependencies() -> dict[str, Any]:
    """Of each crate, all that it needs, and how much of it the router has not."""
    ours = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    have = {package["name"] for package in ours}
    packages = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    licences = {package["name"]: package["license"] for package in packages}
    found: dict[str, Any] = {}
    for crates in (
        ("dynamo-parsers",),
        ("dynamo-parsers-v2",),
        ("tool-parser", "reasoning-parser"),
    ):
        needed: set[str] = set()
        for name in crates:
            tree = cargo(
                *("tree", "--package", name, "--edges", "normal", "--prefix", "none"),
                *("--format", "{p}"),
            )
            needed |= {line.split(" (")[0] for line in tree.splitlines()}
        names = {line.split()[0] for line in needed}
        found[" + ".join(crates)] = {
            "versions": [CRATES[name] for name in crates],
            "licences": sorted({licences[name] for name in crates}),
            "needed": len(needed) - len(crates),
            "new": len(names - have) - len(crates),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    write_package()
    cargo("build", "--release", "--quiet")
    asked = {"tools": TOOLS, "rounds": args.rounds, "forms": forms()}
    program = PACKAGE / "target" / "release" / "answer-crates"
    ran = subprocess.run(
        [program], input=json.dumps(asked), check=True, stdout=subprocess.PIPE, text=True
    )
    rows = rounded(json.loads(ran.stdout))
    report = {"rounds": args.rounds, "not_tried": f"{ABSENT} beside our own reader"}
    write(args.out, {**report, "crates": dependencies(), "rows": rows})
    for row in rows:
        right, cuts = (sum(case[key] for case in row["cases"]) for key in ("right", "cuts"))
        print(
            f"{row['form']:16} {row['crate']:18} {right / cuts:7.1%}  {row['text_ns']:8} ns text"
            f"  {row['arguments_ns']} ns arguments"
        )


if __name__ == "__main__":
    main()
