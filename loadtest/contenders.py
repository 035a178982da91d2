"""What is compared, as it is named on a command line, and how each becomes a server to measure.

    NAME=http://127.0.0.1:9001/v1   a server that runs already
    NAME=settings.yaml              forebay, started here with that file
    NAME=forebay                    the same with the bundled model and no file
    NAME=peer:llama.cpp             a peer that `python -m loadtest.peers install` has installed

`NAME=` may be left out. A key is sent to every URL, and to nothing else; without one, a server of
this machine that wants a key is tried with the demo key. A model is asked for at every URL, and of
forebay with a file, which may have several. Those that are started all stay up until the end, so
that they can be measured in turn; only one at a time is given anything to do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import orjson

from loadtest.bench.campaign import CampaignError
from loadtest.forebay_file import read_start
from loadtest.forebay_server import running_forebay
from loadtest.hidden_keys import HIDDEN_KEY
from loadtest.peers.running import check_engine, running_peer
from loadtest.target import Target
from loadtest.wire.connection import (
    Answer,
    Endpoint,
    ExchangeError,
    UnreachableError,
    checked_key,
    fetch,
)

Kind = Literal["url", "config", "forebay", "peer"]
Tell = Callable[[str], None]

_OWN = "forebay"
_PEER = "peer:"
_SHOWN_CHARACTERS = 200
_NO_ENTRY = (401, 403)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_WITH_MODELS = ("url", "config")


class Source(NamedTuple):
    """Where a contender comes from: a URL, a file, nothing more for `forebay`, a peer's name."""

    name: str
    kind: Kind
    value: str

    @classmethod
    def parse(cls, text: str) -> Source:
        """From "NAME=WHAT" or "WHAT". Raises ValueError with one line that says what is wrong."""
        name, equals, value = text.partition("=")
        # A URL or a path may have an equals sign of its own.
        if not equals or "/" in name or ":" in name:
            name, value = "", text
        if equals and not value:
            raise ValueError(f"{text}: nothing after the equals sign")
        if value.startswith(("http://", "https://")):
            at = Endpoint.parse(value)
            return cls(name or at.authority, "url", value)
        if value == _OWN:
            return cls(name or value, "forebay", "")
        if value.startswith(_PEER) and value != _PEER:
            peer = value.removeprefix(_PEER)
            return cls(name or peer, "peer", peer)
        if value.endswith((".yaml", ".yml")):
            return cls(name or Path(value).stem, "config", value)
        raise ValueError(f"{text}: is no URL, no .yaml file, and neither forebay nor peer:NAME")


@dataclass(frozen=True, slots=True)
class Keys:
    """How one gets in at the servers. `key` is for URLs. Where there is none, a model is listed
    with `tenant_key`, which some tenant of the load has; without that one too, `demo_key` is for
    servers of this machine that want a key and take this one."""

    key: str | None = field(default=None, repr=False)
    tenant_key: str | None = field(default=None, repr=False)
    demo_key: str | None = field(default=None, repr=False)


_NO_KEYS = Keys()


@asynccontextmanager
async def opened(
    sources: Sequence[Source],
    *,
    keys: Keys = _NO_KEYS,
    model: str | None = None,
    tell: Tell,
) -> AsyncIterator[tuple[Target, ...]]:
    """A target for each source, in order, until the end of the scope, when what was started here is
    stopped. `model` is for URLs and files; without a model, the first one that a server lists.

    Raises CampaignError if one of them does not come up or cannot be asked, and ValueError as
    `checked` does.
    """
    checked(sources, key=keys.key, model=model)
    async with AsyncExitStack() as scope:
        targets = []
        for source in sources:
            if source.kind != "url":
                tell(f"{source.name}: starting")
            targets.append(await _opened(source, keys, model, scope, tell))
        yield tuple(targets)


def checked(sources: Sequence[Source], *, key: str | None, model: str | None) -> None:
    """Raises ValueError if two have one name, if none of them can be asked for the model, if the
    key is none that can be sent, or if one could not be started: a file that cannot be read or
    whose keys are not set, a peer that is not there."""
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name}: two servers have this name; give them others, as in a=URL")
    if model is not None and all(source.kind not in _WITH_MODELS for source in sources):
        raise ValueError("--model: is for URLs and files; what is started here has one model")
    checked_key(key)
    for source in sources:
        try:
            if source.kind == "peer":
                check_engine(source.value)
            elif source.kind == "config":
                read_start(Path(source.value))
        except CampaignError as error:
            raise ValueError(str(error)) from None


async def first_model(endpoint: Endpoint) -> str:
    """The first model that a server lists. Raises CampaignError."""
    where = f"{endpoint.url}/models"
    try:
        answer = await fetch(endpoint, "GET", f"{endpoint.base_path}/models")
    except UnreachableError as error:
        raise CampaignError(f"{error}; is `forebay serve` running?") from None
    except ExchangeError as error:
        raise CampaignError(f"{where}: {error}") from None
    if answer.status in _NO_ENTRY:
        which = (
            "is the key right?" if endpoint.key else "it wants a key, and FOREBAY_API_KEY has none"
        )
        raise CampaignError(f"{where}: answered {answer.status}: {which}")
    if answer.status != 200:
        hint = "; give --model if it lists none"
        if answer.status == 404 and not endpoint.base_path:
            hint = f"; is the API at {endpoint.url}/v1?"
        raise CampaignError(f"{where}: answered {answer.status}{_location(answer)}{hint}")
    try:
        found = orjson.loads(answer.body)["data"][0]["id"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, str):
        shown = answer.body.decode(errors="replace")
        if endpoint.key:
            shown = shown.replace(endpoint.key, HIDDEN_KEY)
        raise CampaignError(f"{where}: lists no model, {shown[:_SHOWN_CHARACTERS]!r}")
    return found


def _location(answer: Answer) -> str:
    elsewhere = answer.headers.get("location")
    return "" if elsewhere is None else f" (location: {elsewhere})"


async def _opened(
    source: Source, keys: Keys, model: str | None, scope: AsyncExitStack, tell: Tell
) -> Target:
    if source.kind == "peer":
        peer = await scope.enter_async_context(running_peer(source.value, tell=tell))
        endpoint, model = peer.target.endpoint, peer.target.model
    elif source.kind == "url":
        endpoint = await _with_demo_key(Endpoint.parse(source.value, keys.key), keys, tell)
        lister = endpoint if endpoint.key else replace(endpoint, key=keys.tenant_key)
        return Target(source.name, endpoint, model or await first_model(lister))
    elif source.kind == "forebay":
        endpoint, model = (await scope.enter_async_context(running_forebay())).endpoint, None
    else:
        start = read_start(Path(source.value))
        server = running_forebay(start.settings, flags=start.flags)
        endpoint = (await scope.enter_async_context(server)).endpoint
    return Target(source.name, endpoint, model or await first_model(endpoint))


async def _with_demo_key(endpoint: Endpoint, keys: Keys, tell: Tell) -> Endpoint:
    """With the demo key if it is that which opens the server."""
    demo_key = keys.demo_key
    if endpoint.key or keys.tenant_key or not demo_key or endpoint.host not in _LOOPBACK:
        return endpoint
    opened_by_it = replace(endpoint, key=demo_key)
    path = f"{endpoint.base_path}/models"
    try:
        if (await fetch(endpoint, "GET", path)).status not in _NO_ENTRY:
            return endpoint
        if (await fetch(opened_by_it, "GET", path)).status in _NO_ENTRY:
            return endpoint
    except ExchangeError:  # whoever asks next says so
        return endpoint
    tell(f"{endpoint.url}: opened by this machine's demo key")
    return opened_by_it
