"""What the mock worker answers to the prompts of the clients' scripts. The words of the prompts choose the answer."""

from __future__ import annotations

import json
from typing import Any

CALL = {"name": "get_weather", "arguments": {"city": "Basel"}}
TALL = {"name": "wheel", "height": 7}

# The prompts are in scripts/. Where several answers fit, the first counts: the answer after a tool comes first.
ANSWERS: list[dict[str, Any]] = [
    {"when": "It is 21 degrees", "text": "It is 21 degrees in Basel."},
    {
        "when": "weather in Basel",
        "text": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        "pieces": "characters",
        "tokens_per_step": 3,
    },
    {"when": "Describe the wheel", "text": json.dumps(TALL), "pieces": "characters"},
    {"when": "Think first", "text": "<think>\nSeven times six.\n</think>\n\nIt is 42."},
    {"text": "Hello there, how are you today?"},
]
