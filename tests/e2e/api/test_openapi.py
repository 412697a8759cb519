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
RESPONSE = {"model": MODEL, "input": "Hello?"}
MESSAGE = CHAT | {"max_tokens": 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    with scripted(
        folder,
        [{"text": "Fine, thanks."}],
        f"--cors-origin={ORIGIN}",
        "--cors-origin=https://a.com",
    ) as server:
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
    for name, header in response["headers"].items():
        assert name.lower() in reply.headers or not header["required"], f"{method} {path}: {name}"
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
    known["file"] = "page.js"
    endless = "/dashboard/events"
    for path, methods in document["paths"].items():
        if "get" in methods:
            query = "?once=true" if path == endless else ""
            reply = server.get(path.format(**known) + query)
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
        ("/v1/responses", RESPONSE),
        ("/v1/responses", RESPONSE | {"model": "other"}),
        ("/v1/responses", RESPONSE | {"input": []}),
        ("/v1/responses", RESPONSE | {"previous_response_id": "resp_x"}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages", MESSAGE | {"stop_sequences": ["than"]}),
        ("/v1/messages", MESSAGE | {"max_tokens": "many"}),
        ("/v1/messages", MESSAGE | {"model": "other"}),
        ("/v1/messages", {}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/messages/count_tokens", {}),
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


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/responses", RESPONSE, "ResponseEvent"),
        ("/v1/responses", RESPONSE | {"max_output_tokens": 2}, "ResponseEvent"),
        ("/v1/messages", MESSAGE, "MessageEvent"),
    ],
)
def test_named_events_are_documented(
    server: Server, document: dict[str, Any], path: str, body: dict[str, Any], event: str
) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert content["text/event-stream"]["x-event"]["$ref"].endswith(f"/{event}")
    reply = server.post(path, body | {"stream": True})
    events = reply.body.decode().strip().split("\n\n")
    assert len(events) > 5
    for one in events:
        name, _, data = one.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        check(document, event, value)


def test_what_is_stored_of_a_response_is_documented(
    server: Server, document: dict[str, Any]
) -> None:
    made = server.post("/v1/responses", RESPONSE).json["id"]
    path = "/v1/responses/{response}"
    answered(document, "get", path, server.get(f"/v1/responses/{made}"))
    answered(
        document, "get", f"{path}/input_items", server.get(f"/v1/responses/{made}/input_items")
    )
    for query in ("limit=0", "order=up", "wish=1"):
        wrong = server.get(f"/v1/responses/{made}/input_items?{query}")
        answered(document, "get", f"{path}/input_items", wrong)
        assert wrong.status == 400
    for query in ("stream=true", "stream=null", "stream=false&stream=false", "starting_after=1"):
        wrong = server.get(f"/v1/responses/{made}?{query}")
        answered(document, "get", path, wrong)
        assert (wrong.status, wrong.error["param"]) == (400, query.partition("=")[0])
    for query in ("", "stream=false", "stream=false&include[]=reasoning.encrypted_content"):
        assert server.get(f"/v1/responses/{made}?{query}").status == 200
    answered(document, "post", f"{path}/cancel", server.post(f"/v1/responses/{made}/cancel", {}))
    deleted = server.send("DELETE", f"/v1/responses/{made}", None, {})
    answered(document, "delete", path, deleted)
    assert deleted.status == 200


@pytest.mark.parametrize(
    ("shape", "path", "base", "least"),
    [
        ("ChatRequest", "/v1/chat/completions", CHAT, 30),
        ("ResponseRequest", "/v1/responses", RESPONSE, 25),
        ("MessageRequest", "/v1/messages", MESSAGE, 20),
    ],
)
def test_what_the_document_calls_wrong_is_refused(
    server: Server,
    document: dict[str, Any],
    shape: str,
    path: str,
    base: dict[str, Any],
    least: int,
) -> None:
    """A sample of each row: a value of another type, and one beyond its range."""
    schemas = document["components"]["schemas"]
    checked = 0
    for name, schema in schemas[shape]["properties"].items():
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
            reply = server.post(path, base | {name: value})
            assert reply.status == 400, f"{name}: {value}: {reply.body!r}"
            if path == "/v1/messages":
                assert f"`{name}`" in reply.error["message"]  # its errors have no other place
            else:
                assert reply.error["param"] == name
            checked += 1
    assert checked > least


def test_the_page_may_load_nothing_from_elsewhere(server: Server) -> None:
    page = server.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    for part in ("page.js", "page.css"):
        assert f"docs/{part}".encode() in page.body
        assert server.get(f"/docs/{part}").status == 200


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/v1/chat/completions", "authorization,content-type"),
        ("POST", "/v1/messages", "anthropic-version,content-type,x-api-key"),
        ("GET", "/v1/responses/resp_x", "authorization"),
        ("DELETE", "/v1/responses/resp_x", "authorization,x-headrace-tenant"),
    ],
)
def test_a_browser_asks_before_a_page_of_another_origin_may_send(
    server: Server, method: str, path: str, headers: str
) -> None:
    asks = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": headers,
    }
    reply = server.send("OPTIONS", path, None, asks)
    answer = reply.headers
    assert reply.status == 200
    assert answer["access-control-allow-origin"] == ORIGIN
    assert answer["access-control-allow-headers"] == headers
    assert method in answer["access-control-allow-methods"]
    assert answer["access-control-max-age"] == "7200"
    assert "access-control-allow-credentials" not in answer
    assert "origin" in answer["vary"].lower()  # caches keep answers to other origins apart
    other = server.send("OPTIONS", path, None, asks | {"Origin": "https://b.com"})
    assert "access-control-allow-origin" not in other.headers
    # what was asked for may be done and read, and by no other page
    sent = server.send(method, path, {} if method == "POST" else None, {"Origin": ORIGIN})
    assert sent.headers["access-control-allow-origin"] == ORIGIN
    assert sent.status in {400, 404}
    if method != "GET":
        body = {} if method == "POST" else None
        assert server.send(method, path, body, {"Origin": "https://b.com"}).status == 403
