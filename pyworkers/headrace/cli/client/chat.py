"""`headrace chat`: a conversation in the terminal. Needs nothing but the standard library."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from headrace.cli.client import keys
from headrace.cli.client.terminal import printable
from headrace.cli.client.unix_http import UnixConnection

if TYPE_CHECKING:
    import ssl

HELP = """\
  /reset          forget the conversation
  /system TEXT    forget it and set the system message; without TEXT, none
  /stats          switch the figures after each answer on or off
  /help           this text
  /exit           leave (so does Ctrl-D)
  Ctrl-C stops an answer; the conversation goes on."""


class ChatError(Exception):
    """The server did not answer, or answered with an error. One line for a person."""


class KeyRefusedError(ChatError):
    """The server does not serve whoever has this key: asking again does not help."""


class NotThereError(ChatError):
    """The server knows no such path."""


@dataclass(slots=True)
class Server:
    """Where requests go."""

    url: str
    api_key: str | None = None
    key_from: str = keys.API_KEY_FROM  # for whoever gave none, or a wrong one
    tls: ssl.SSLContext | None = None  # None: as the system has it
    timeout_s: float = 600.0  # of silence

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """The response, with status 200 or 202. Raises ChatError."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        with contextlib.ExitStack() as failed:
            try:
                connection, base = _connection(self)
                failed.callback(connection.close)
                connection.request(
                    method,
                    base + path,
                    None if body is None else json.dumps(body),
                    headers | {"Connection": "close"},
                )
                response = connection.getresponse()
                failed.pop_all()
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ChatError(f"cannot reach {self.url}: {error}") from error
        if response.status not in {200, 202}:
            reason = _message(response.read()) or f"status {response.status}"
            if response.status in {401, 403}:
                raise KeyRefusedError(f"{reason}; the key comes from {self.key_from}")
            raise NotThereError(reason) if response.status == 404 else ChatError(reason)
        return response

    def first_model(self) -> str:
        """Name of the first model it serves."""
        with contextlib.closing(self.request("GET", "/v1/models")) as response:
            models = json.loads(response.read())["data"]
        if not models:
            raise ChatError(f"{self.url} serves no model yet")
        return models[0]["id"]


def _connection(server: Server) -> tuple[http.client.HTTPConnection, str]:
    """A way to a server, not dialled yet, and what comes before each path there."""
    url, limit_s = server.url, server.timeout_s
    if url.startswith("unix:"):
        return UnixConnection(url.removeprefix("unix:"), timeout=limit_s), ""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    host, base = parts.hostname or "127.0.0.1", parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme == "https":
        tls = server.tls
        return http.client.HTTPSConnection(host, parts.port, timeout=limit_s, context=tls), base
    return http.client.HTTPConnection(host, parts.port, timeout=limit_s), base


@dataclass(slots=True)
class Answer:
    """What came of one request so far. Times are seconds after it was sent."""

    text: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None

    def stats(self) -> str:
        """Time to first token, and the rate after it."""
        if self.first_s is None:
            return "no token"
        rate = (self.tokens - 1) / (self.last_s - self.first_s) if self.tokens > 1 else 0.0
        return (
            f"first token {self.first_s * 1000:.0f} ms, {rate:.1f} tok/s, {self.tokens} tokens, "
            f"prompt {self.prompt_tokens} ({self.cached_tokens} cached)"
        )


@dataclass(slots=True)
class Chat:
    """One conversation. `messages` always alternates, so a failed turn leaves no trace."""

    server: Server
    model: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def reset(self) -> None:
        self.messages = []

    def say(self, text: str, answer: Answer) -> Generator[str]:
        """Send `text`; pieces of the answer as they come, and all of it in `answer`.

        An answer that is stopped, by closing the generator, is kept as far as it came.
        Raises ChatError.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = self.options | {
            "model": self.model,
            "messages": [*system, *turn],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.monotonic()
        response = self.server.request("POST", "/v1/chat/completions", body)
        try:
            for event in events(response):
                answer.last_s = time.monotonic() - sent
                piece = _apply(event, answer)
                if piece:
                    answer.first_s = answer.first_s or answer.last_s
                    answer.text += piece
                    yield piece
        finally:
            response.close()  # before the end, this cancels the request on the server
            if answer.text:
                self.messages = [*turn, {"role": "assistant", "content": answer.text}]


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]. Raises ChatError for an error, or a cut."""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ChatError(f"the server sent {_clip(data)}, which is no event of a chat")
            event = cast(dict[str, Any], event)
            if event.get("error") is not None:
                raise ChatError(_message(data) or "the server failed")
            yield event
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise ChatError(f"the answer broke off: {error}") from error
    raise ChatError("the answer broke off")


def _clip(data: bytes) -> str:
    return data[:60].decode(errors="replace")


def _apply(event: dict[str, Any], answer: Answer) -> str:
    """Take usage and finish reason into `answer`; the new text. Raises ChatError where the event is of another form."""
    try:
        return _read(event, answer)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        shown = _clip(json.dumps(event).encode())
        raise ChatError(f"the server sent {shown}, which is no event of a chat") from error


def _read(event: dict[str, Any], answer: Answer) -> str:
    if usage := event.get("usage"):
        answer.tokens = int(usage["completion_tokens"])
        answer.prompt_tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = int(details.get("cached_tokens") or 0)
    for choice in event.get("choices", ()):
        answer.finish = choice.get("finish_reason") or answer.finish
        return "" + (choice.get("delta", {}).get("content") or "")
    return ""


def _message(body: bytes) -> str | None:
    """The text of an OpenAI-shaped error."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.loads(body)["error"]["message"]
    return None


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends; the exit status."""
    server = Server(args.url, keys.api_key(args), tls=keys.tls(args))
    options = {"temperature": args.temperature, "max_completion_tokens": args.max_tokens}
    try:
        model = args.model or server.first_model()
    except ChatError as error:
        print(printable(f"headrace chat: {error}"), file=sys.stderr)
        return 1
    chat = Chat(server, model, args.system, {k: v for k, v in options.items() if v is not None})
    if not sys.stdin.isatty():
        return _from_pipe(chat, args.stats)
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` history and editing
    print(printable(f"{model} at {args.url}; /help lists commands"))
    return _converse(chat, args.stats)


def _converse(chat: Chat, stats: bool) -> int:
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("  (/exit or Ctrl-D leaves)")
            continue
        match text.partition(" "):
            case ["", _, _]:
                pass
            case ["/exit" | "/quit", _, _]:
                return 0
            case ["/reset", _, _]:
                chat.reset()
            case ["/system", _, system]:
                chat.reset()
                chat.system = system.strip() or None
            case ["/stats", _, _]:
                stats = not stats
            case _ if text.startswith("/"):
                print(HELP)
            case _:
                _turn(chat, text, stats)


def _from_pipe(chat: Chat, stats: bool) -> int:
    """Each line is one message of the same conversation."""
    failed = False
    for line in sys.stdin:
        if text := line.strip():
            failed |= not _turn(chat, text, stats)
    return int(failed)


def _turn(chat: Chat, text: str, stats: bool) -> bool:
    """Ask and print; whether the answer came. Ctrl-C ends the answer only."""
    answer = Answer()
    try:
        with contextlib.closing(chat.say(text, answer)) as pieces:
            for piece in pieces:
                print(printable(piece), end="", flush=True)
        print(" [cut at the limit of tokens]" if answer.finish == "length" else "")
    except ChatError as error:
        begin = "\n" if answer.text else ""
        print(f"{begin}headrace chat: {printable(str(error))}", file=sys.stderr)
        return False
    except KeyboardInterrupt:
        print(" [stopped]")
    if stats:
        print(f"({answer.stats()})", file=sys.stderr)
    return True
