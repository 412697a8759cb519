"""What a script of a client says: one JSON row for each feature that it tried."""

import json
import os
import sys
import traceback

URL = os.environ["HEADRACE_URL"]
MODEL = os.environ["HEADRACE_MODEL"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "height": {"type": "integer"}},
    "required": ["name", "height"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
HELLO = "Hello there, how are you today?"


def feature(name):
    """Runs the function at once; it fails by an exception."""

    def run(test):
        row = {"feature": name, "result": "pass", "detail": ""}
        try:
            test()
        except Exception as error:
            row["result"] = "fail"
            row["detail"] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc(file=sys.stderr)
        print(json.dumps(row), flush=True)
        return test

    return run


def unsupported(name, why):
    """The client itself has no such thing."""
    print(json.dumps({"feature": name, "result": "unsupported", "detail": why}), flush=True)
