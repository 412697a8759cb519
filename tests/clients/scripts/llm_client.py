import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import HELLO, MODEL, SCHEMA, URL, feature

folder = tempfile.mkdtemp()
models = (
    f"- model_id: headrace\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: none\n"
)
models += "  supports_schema: true\n  supports_tools: true\n"
Path(folder, "extra-openai-models.yaml").write_text(models)


def llm(*arguments):
    ran = subprocess.run(
        [sys.executable, "-m", "llm", *arguments, "-m", "headrace", "--key", "unused", "--no-log"],
        env=os.environ | {"LLM_USER_PATH": folder},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr[-300:]
    return ran.stdout


@feature("chat")
def chat():
    assert HELLO in llm("Hi", "--no-stream")


@feature("stream")
def stream():
    assert HELLO in llm("Hi")


@feature("structured")
def structured():
    answer = llm("Describe the wheel", "--schema", json.dumps(SCHEMA), "--no-stream")
    assert json.loads(answer)["height"] == 7, answer


@feature("tools")
def tools():
    functions = "def get_weather(city: str) -> str:\n    return 'It is 21 degrees'\n"
    answer = llm("What is the weather in Basel?", "--functions", functions, "--no-stream")
    assert "21 degrees" in answer, answer
