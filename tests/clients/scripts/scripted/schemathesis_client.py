"""Random requests by our own document: the served model is the one that it may name."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from rows import MODEL, URL, feature

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@feature("document")
def document():
    with urllib.request.urlopen(f"{URL}/openapi.json", timeout=30) as answer:
        document = json.load(answer)
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request") and "model" in schema["properties"]:
            schema["properties"]["model"] = {"const": MODEL}
    folder = Path(tempfile.mkdtemp())
    (folder / "openapi.json").write_text(json.dumps(document))
    ran = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", str(folder / "openapi.json"), "--url", URL, "--checks", CHECKS),
            *(
                "--max-examples",
                os.environ.get("EXAMPLES", "10"),
                "--phases",
                "examples,coverage,fuzzing",
            ),
            *("--exclude-path-regex", "/drain$", "--seed", "1", "--no-color"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
    )
    print(ran.stdout[-6000:], file=sys.stderr)
    assert ran.returncode == 0, ran.stdout[-280:]
