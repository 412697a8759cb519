"""An agent's loop with the default model and the `openai` client: a call that has to come, its result, an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.serving.server import Server

CITY = {"type": "string", "maxLength": 30}
DEGREES = {"type": "integer", "minimum": -50, "maximum": 50}
MOST_TURNS = 6


def function(name: str, about: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


WEATHER = function("get_weather", "The weather of a city now.", city=CITY)
REPORT = function("report", "The final answer to the user.", city=CITY, degrees=DEGREES)


class Conversation:
    """Messages so far, and what a turn adds to them."""

    def __init__(self, server: Server, text: str, *, streamed: bool) -> None:
        self.server, self.streamed = server, streamed
        self.messages: list[Any] = [{"role": "user", "content": text}]

    def turn(self, **wishes: Any) -> Any:
        """The model's next message, put together by the client where it is streamed."""
        body: Any = {
            "model": self.server.model,
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": 120,
            **wishes,
        }
        completions = self.server.client.chat.completions
        if self.streamed:
            with completions.stream(**body) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = completions.create(**body).choices[0]
        called = bool(choice.message.tool_calls)
        assert choice.finish_reason == ("tool_calls" if called else "stop")
        self.messages.append(choice.message.model_dump(include={"role", "content", "tool_calls"}))
        return choice.message

    def call(self, tools: list[Any]) -> tuple[str, dict[str, Any]]:
        """The one call of a turn that has to be one."""
        message = self.turn(tools=tools, tool_choice="required", parallel_tool_calls=False)
        assert message.content is None
        [call] = message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def result(self, text: str) -> None:
        call = self.messages[-1]["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text})


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_its_result_and_an_answer_in_words(real: Server, streamed: bool) -> None:
    talk = Conversation(real, "What is the weather in Paris?", streamed=streamed)
    assert talk.call([WEATHER]) == ("get_weather", {"city": "Paris"})
    talk.result("It is 21 degrees and sunny in Paris.")
    message = talk.turn()
    assert not message.tool_calls
    assert "21 degrees" in message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_whose_every_turn_is_a_call_comes_to_its_final_one(
    real: Server, streamed: bool
) -> None:
    talk = Conversation(real, "Get the weather in Paris, then report it.", streamed=streamed)
    called: list[str] = []
    for _ in range(MOST_TURNS):
        name, arguments = talk.call([WEATHER, REPORT])
        called.append(name)
        if name == "report":
            assert set(arguments) == {"city", "degrees"}
            assert arguments["degrees"] == 21
            break
        assert set(arguments) == {"city"}
        talk.result(f"It is 21 degrees in {arguments['city']}. Report it with the function report.")
    assert called[0] == "get_weather"
    assert called[-1] == "report"
