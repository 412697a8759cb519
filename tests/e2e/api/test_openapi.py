"""`/openapi.json` is a valid document, real answers are what it says, and `/docs` needs nobody else."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from helpers.serving.scripted import MODEL, scripted
from helpers.serving.server import Reply, Server

ORIGIN = "https://chat.example.com"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    with scripted(folder, [{"text": "Fine, thanks."}], f"--allowed-origins={ORIGIN}") as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return server.get("/openapi.json").json


def check(document: dict[str, Any], name: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


def answered(document: dict[str, Any], method: str, path: str, reply: Reply) -> None:
    """The status is documented, and the body is what it says."""
    responses = document["paths"][path][method]["responses"]
    assert str(reply.status) in responses, f"{method} {path}: {reply.status} {reply.body!r}"
    response = responses[str(reply.status)]
    if "$ref" in response:
        response = document["components"]["responses"][response["$ref"].rsplit("/", 1)[1]]
    media = reply.headers["content-type"].split(";")[0]
    schema = response["content"][media]["schema"]
    if media == "application/json":
        check(document, schema["$ref"].rsplit("/", 1)[1], reply.json)


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()
    assert document["openapi"] == "3.1.0"
    names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))


def test_what_is_read_without_a_body_is_documented(
    server: Server, document: dict[str, Any]
) -> None:
    known = {"name": MODEL, "worker": "w0", "request": "nothing", "response": "nothing"}
    for path, methods in document["paths"].items():
        if "get" in methods:
            reply = server.get(path.format(**known))
            answered(document, "get", path, reply)
            assert reply.status < 500
    answered(document, "get", "/v1/models/{name}", server.get("/v1/models/other/one"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/chat/completions", CHAT | {"temperature": 7}),
        ("/v1/chat/completions", CHAT | {"model": "other"}),
        ("/v1/completions", {"model": MODEL, "prompt": [[7, 8], [9]], "logprobs": 1, "echo": True}),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 3}),
        ("/v1/completions", {"model": MODEL}),
        ("/tokenize", {"prompt": "How high?", "return_token_strs": True}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"tokens": [300, 301]}),
        ("/detokenize", {"tokens": "text"}),
        ("/workers/{worker}/drain", {"budget_ms": -1}),
    ],
)
def test_answers_and_errors_are_documented(
    server: Server, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    reply = server.post(path.format(worker="w0"), body)
    answered(document, "post", path, reply)
    assert reply.status < 500, reply.body


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/chat/completions", CHAT, "ChatCompletionChunk"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "logprobs": 0}, "CompletionChunk"),
    ],
)
def test_events_are_documented(
    server: Server, document: dict[str, Any], path: str, body: dict[str, Any], event: str
) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert content["text/event-stream"]["x-event"]["$ref"].endswith(f"/{event}")
    with server.stream(path, body | {"stream_options": {"include_usage": True}}) as stream:
        events = list(stream)
    assert events.pop() == "[DONE]"
    for one in events:
        check(document, event, json.loads(one))


def test_what_the_document_calls_wrong_is_refused(server: Server, document: dict[str, Any]) -> None:
    """A sample of each row: a value of another type, and one beyond its range."""
    schemas = document["components"]["schemas"]
    checked = 0
    for name, schema in schemas["ChatRequest"]["properties"].items():
        wrong: list[Any] = []
        if "integer" in schema.get("type", []) or "number" in schema.get("type", []):
            wrong = ["a text", schema["maximum"] + 1]
        elif "boolean" in schema.get("type", []):
            wrong = ["a text", 1]
        elif "string" in schema.get("type", []):
            wrong = [3]
        for value in wrong:
            if isinstance(value, int) and value > 2**62:
                continue  # beyond it a JSON number is no integer any more
            reply = server.post("/v1/chat/completions", CHAT | {name: value})
            assert reply.status == 400, f"{name}: {value}: {reply.body!r}"
            assert reply.error["param"] == name
            checked += 1
    assert checked > 30


def test_the_page_may_load_nothing_from_elsewhere(server: Server) -> None:
    page = server.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    for part in ("page.js", "page.css"):
        assert f"docs/{part}".encode() in page.body
        assert server.get(f"/docs/{part}").status == 200


def test_a_browser_asks_before_a_page_of_another_origin_may_send(server: Server) -> None:
    asks = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    reply = server.send("OPTIONS", "/v1/chat/completions", None, asks)
    headers = reply.headers
    assert reply.status == 200
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-max-age"] == "7200"
    assert "access-control-allow-credentials" not in headers
    assert "origin" in headers["vary"].lower()  # caches keep answers to other origins apart
    other = server.send("OPTIONS", "/v1/chat/completions", None, asks | {"Origin": "https://b.com"})
    assert "access-control-allow-origin" not in other.headers
