"""A schema on the command line."""

import json

from llm_command import llm
from rows import ABOUT, WHEEL, feature


@feature("structured")
def structured():
    greedy = ("--option", "temperature", "0", "--option", "max_tokens", "100")
    answer = json.loads(llm(ABOUT, "--schema", json.dumps(WHEEL), "--no-stream", *greedy))
    for name, schema in WHEEL["properties"].items():
        assert answer[name] in schema.get("enum", (True, False)), answer
