"""`forebay chat`: a terminal conversation with a running server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import orjson
import typer

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
from gateway.cli.server_call import DEFAULT_URL, connected, printable, refusal
from gateway.state_dir import StateDir

_KEY_HINT = "see --key and FOREBAY_API_KEY"


@dataclass(slots=True)
class Turn:
    """One answer as it came in. Times are `time.perf_counter` seconds."""

    started: float
    first_token: float | None = None
    last_token: float | None = None
    pieces: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.pieces)

    def summary(self) -> str:
        """TTFT, tokens per second after the first token, cached prompt tokens."""
        if self.first_token is None or self.last_token is None:
            return "no tokens"
        parts = [f"TTFT {1000 * (self.first_token - self.started):.0f} ms"]
        generated = self.usage.get("completion_tokens", 0)
        if generated > 1 and self.last_token > self.first_token:
            rate = (generated - 1) / (self.last_token - self.first_token)
            parts.append(f"{rate:.1f} tokens/s")
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"{cached} of {self.usage.get('prompt_tokens', 0)} prompt tokens cached")
        return " · ".join(parts)


def chat(
    url: Annotated[str, typer.Option(help="The server's address.")] = DEFAULT_URL,
    key: Annotated[
        str | None,
        typer.Option(envvar="FOREBAY_API_KEY", help="API key; else this machine's demo key."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model or alias; else the first one listed.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, metavar="T", help="Else the model's own default.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest answer, in tokens.")
    ] = None,
) -> None:
    """Talk to a running server. Ctrl-C stops an answer, Ctrl-D leaves."""
    key = key or _demo_key()
    with connected(url, key, read_timeout_s=600.0) as client:
        fields = {"temperature": temperature, "max_tokens": max_tokens}
        given = {name: value for name, value in fields.items() if value is not None}
        name = _first_model(client) if model is None else _known_model(client, model)
        _converse(client, name, system, given)


def _converse(
    client: httpx.Client, model: str, system: str | None, fields: dict[str, float]
) -> None:
    messages: list[dict[str, str]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    typer.echo(f"{model} at {client.base_url}. Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            said = input("\n> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            raise
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        turn = Turn(started=time.perf_counter())
        try:
            for piece in _stream(client, model, messages, fields, turn):
                typer.echo(printable(piece), nl=False)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False)
        except CommandError as error:
            # A turn that the server refuses (too long, too many at once) does not end the chat.
            messages.pop()
            typer.echo(f"forebay: {error}", err=True)
            continue
        typer.echo(f"\n[{turn.summary()}]")
        messages.append({"role": "assistant", "content": turn.text})


def _stream(
    client: httpx.Client,
    model: str,
    messages: list[dict[str, str]],
    fields: dict[str, float],
    turn: Turn,
) -> Iterator[str]:
    """Yield the answer's text as it arrives, filling in `turn`. Raises CommandError."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise CommandError(refusal(response, key_hint=_KEY_HINT))
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == line:
                continue
            if data == "[DONE]":
                return
            try:
                event = orjson.loads(data)
                failure = event["error"]["message"] if event.get("error") else None
                turn.usage = event.get("usage") or turn.usage
                choices = event.get("choices", ())
                pieces = [str(choice["delta"].get("content") or "") for choice in choices]
            except (ValueError, LookupError, TypeError, AttributeError):
                raise CommandError(
                    f"what answers at {client.base_url} does not stream as OpenAI's API does"
                ) from None
            if failure is not None:
                raise CommandError(f"the answer broke off: {printable(str(failure))}")
            for piece in filter(None, pieces):
                turn.last_token = time.perf_counter()
                turn.first_token = turn.first_token or turn.last_token
                turn.pieces.append(piece)
                yield piece
    raise CommandError("the answer broke off before its end")


def _first_model(client: httpx.Client) -> str:
    listed = _listed_models(client)
    if not listed:
        raise CommandError(f"{client.base_url} does not list a model for this key")
    return listed[0]


def _listed_models(client: httpx.Client) -> list[str]:
    """The models' own names; none where the answer is no list of models."""
    response = client.get("/v1/models")
    if response.status_code != httpx.codes.OK:
        raise CommandError(refusal(response, key_hint=_KEY_HINT))
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, LookupError, TypeError):
        return []


def _known_model(client: httpx.Client, name: str) -> str:
    """The name, if the server has it for this key, as a model's own or an alias."""
    response = client.get(f"/v1/models/{quote(name)}")
    if response.status_code == httpx.codes.NOT_FOUND:
        listed = _listed_models(client)
        raise CommandError(
            f"--model: {client.base_url} has no such model for this key; it lists "
            f"{', '.join(map(printable, listed)) or 'none'}"
        )
    if response.status_code != httpx.codes.OK:
        raise CommandError(refusal(response, key_hint=_KEY_HINT))
    return name


def _demo_key() -> str:
    key = StateDir(StateDir.locate(os.environ)).existing_demo_key()
    if key is None:
        raise CommandError("no key: give --key or set FOREBAY_API_KEY", exit_code=exit_codes.USAGE)
    return key
