"""What a script of a client says: one JSON row for each feature that it tried."""

import json
import os
import sys
import traceback

URL = os.environ["HEADRACE_URL"]
MODEL = os.environ["HEADRACE_MODEL"]
# A model that may say anything answers this in words: only one that is held to it answers with a wheel.
ABOUT = "Tell me about a wheel."
WHEEL = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["cart", "water", "potter"]},
        "spokes": {"type": "integer", "enum": [4, 6, 8]},
        "turns": {"type": "boolean"},
    },
    "required": ["kind", "spokes", "turns"],
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
