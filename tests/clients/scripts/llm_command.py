"""The command `llm` with our server as one of its models."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import MODEL, URL

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
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-300:]
    return ran.stdout
