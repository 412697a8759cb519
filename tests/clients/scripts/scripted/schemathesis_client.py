"""Random requests by our own document: the served model is the one that it may name."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from rows import MODEL, URL, feature

# Some of what the document allows is refused: rules of two fields, texts without tokens, ids of other models.
LEFT_OUT = "positive_data_acceptance"


@feature("document")
def document():
    with urllib.request.urlopen(f"{URL}/openapi.json", timeout=30) as answer:
        document = json.load(answer)
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request") and "model" in schema["properties"]:
            may_be_null = "null" in schema["properties"]["model"].get("type", "")
            schema["properties"]["model"] = {"enum": [MODEL, None] if may_be_null else [MODEL]}
    folder = Path(tempfile.mkdtemp())
    (folder / "openapi.json").write_text(json.dumps(document))
    ran = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", str(folder / "openapi.json"), "--url", URL),
            *("--checks", "all", "--exclude-checks", LEFT_OUT),
            *(
                "--max-examples",
                os.environ.get("EXAMPLES", "10"),
                "--phases",
                "examples,coverage,fuzzing,stateful",
            ),
            *("--exclude-path-regex", "(/drain|/dashboard/events)$", "--seed", "1", "--no-color"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
    )
    print(ran.stdout[-6000:], file=sys.stderr)
    assert ran.returncode == 0, ran.stdout[-280:]
