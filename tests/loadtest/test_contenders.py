"""What is compared, as it is named, and what is asked of a server before it is measured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loadtest import contenders
from loadtest.bench.campaign import CampaignError
from loadtest.contenders import Keys, Source, checked, first_model, opened
from loadtest.forebay_server import KEY_VARIABLE, RunningServer
from loadtest.wire.connection import Endpoint
from tests.loadtest.fake_server import Call, Reply, fake_server

MODELS = b'{"object": "list", "data": [{"id": "tiny"}, {"id": "huge"}]}'


def unheard(line: str) -> None:
    """Progress that nobody reads."""


async def lists_models(call: Call, reply: Reply) -> None:
    if call.path == "/v1/models":
        await reply.whole(200, MODELS)
    else:
        await reply.whole(404, b"{}")


class Started:
    """Stands in for forebay itself: notes how it would be started, and whether it is still up."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.settings: list[dict[str, str]] = []
        self.flags: list[tuple[str, ...]] = []
        self.up = 0

    @asynccontextmanager
    async def __call__(
        self, settings: Mapping[str, str] | None = None, *, flags: Sequence[str] = ()
    ) -> AsyncIterator[RunningServer]:
        self.settings.append(dict(settings or {}))
        self.flags.append(tuple(flags))
        self.up += 1
        try:
            yield RunningServer(self.endpoint, 1, 0.0, Path("unused"))
        finally:
            self.up -= 1


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Started]:
    async with fake_server(lists_models, key="made-for-it") as server:
        stand_in = Started(server.endpoint)
        monkeypatch.setattr(contenders, "running_forebay", stand_in)
        yield stand_in


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("ours=http://127.0.0.1:8000/v1", ("ours", "url", "http://127.0.0.1:8000/v1")),
        (
            "https://api.example.com/v1",
            ("api.example.com:443", "url", "https://api.example.com/v1"),
        ),
        ("http://h:1/v1/a=b", ("h:1", "url", "http://h:1/v1/a=b")),
        ("big=conf/a.yaml", ("big", "config", "conf/a.yaml")),
        ("conf/rate=2/small.yml", ("small", "config", "conf/rate=2/small.yml")),
        ("forebay", ("forebay", "forebay", "")),
        ("base=forebay", ("base", "forebay", "")),
        ("peer:vllm", ("vllm", "peer", "vllm")),
        ("theirs=peer:llama.cpp", ("theirs", "peer", "llama.cpp")),
    ],
)
def test_names_and_what_they_stand_for(text: str, source: tuple[str, str, str]) -> None:
    assert Source.parse(text) == source


@pytest.mark.parametrize(
    "text", ["", "ours=", "nonsense", "peer:", "a=b", "http://", "x=http:///v1"]
)
def test_what_stands_for_nothing_is_refused_in_one_line(text: str) -> None:
    refusal = r"must look like|is no URL|nothing after|not a URL"
    with pytest.raises(ValueError, match=refusal) as said:
        Source.parse(text)
    assert "\n" not in str(said.value)


async def test_a_running_server_is_asked_for_its_model_unless_one_is_named() -> None:
    async with fake_server(lists_models) as server:
        url = f"http://127.0.0.1:{server.endpoint.port}/v1"
        async with opened([Source("a", "url", url)], keys=Keys("secret"), tell=unheard) as [target]:
            assert (target.name, target.model, target.endpoint.key) == ("a", "tiny", "secret")
        assert server.calls[0].headers["authorization"] == "Bearer secret"
        sources = [Source("b", "url", url)]
        async with opened(sources, model="huge", tell=unheard) as [target]:
            assert target.model == "huge"
        assert len(server.calls) == 1


async def test_started_servers_stay_up_together_and_go_together(started: Started) -> None:
    told: list[str] = []
    sources = [Source("a", "forebay", ""), Source("b", "forebay", "")]
    async with opened(sources, keys=Keys("not theirs"), tell=told.append) as targets:
        assert [target.name for target in targets] == ["a", "b"]
        assert {target.endpoint.key for target in targets} == {"made-for-it"}
        assert started.up == 2
    assert started.up == 0
    assert told == ["a: starting", "b: starting"]


async def test_nothing_is_started_before_all_can_be(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("X_KEY", raising=False)
    path = tmp_path / "one.yaml"
    path.write_text("tenants: [{id: x, keys: [{env: X_KEY}]}]\n")
    for source, why in [
        (Source("c", "config", "nowhere.yaml"), r"nowhere\.yaml: cannot be read"),
        (Source("c", "config", str(path)), r"one\.yaml: X_KEY is not set"),
        (Source("c", "peer", "vlm"), "vlm: no such peer"),
    ]:
        with pytest.raises(ValueError, match=why):
            async with opened([Source("a", "forebay", ""), source], tell=unheard):
                pytest.fail("the second cannot be there")
    assert not started.flags


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            "models: [{name: a, path: bundled}]\n",
            {"FOREBAY_TENANTS__0__ID": "loadtest"},
        ),
        (
            "tenants: [{id: x, keys: [{env: X_KEY}]}, {id: loadtest}]\n",
            {"FOREBAY_TENANTS__2__ID": "loadtest-client"},
        ),
        (f"tenants: [{{id: x, keys: [{{env: {KEY_VARIABLE}}}]}}]\n", {}),
        ("- what\n- is this\n", {"FOREBAY_TENANTS__0__ID": "loadtest"}),
    ],
)
async def test_a_file_is_used_where_it_is_with_a_tenant_to_measure_as(
    started: Started,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    settings: dict[str, str],
) -> None:
    monkeypatch.setenv("X_KEY", "sk-x")
    path = tmp_path / "one.yaml"
    path.write_text(text)
    async with opened([Source("one", "config", str(path))], tell=unheard) as [target]:
        assert target.model == "tiny"

    keys = {name.replace("__ID", "__KEYS"): f"[{{env: {KEY_VARIABLE}}}]" for name in settings}
    assert started.settings == [settings | keys]
    assert started.flags == [("--config", str(path))]


async def test_a_file_that_is_no_yaml_is_refused_without_being_quoted(
    started: Started, tmp_path: Path
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("tenants: [{keys: 'sk-secret")
    with pytest.raises(ValueError, match="is no valid YAML") as caught:
        async with opened([Source("one", "config", str(path))], tell=unheard):
            pytest.fail("nothing can be started with it")
    assert "sk-secret" not in str(caught.value)
    assert not started.flags


async def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a: two servers have this name"):
        async with opened([Source("a", "forebay", "")] * 2, tell=unheard):
            pytest.fail("nobody could tell them apart")


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"{}", "answered 401: is the key right"),
        (307, b"", "answered 307"),
        (200, b'{"error": "sk-secret?"}', r"lists no model, '{\"error\": \"\[key\]\?"),
        (200, b"<html>", "lists no model"),
        (200, b'{"data": []}', "lists no model"),
        (200, b'{"data": [{"id": 3}]}', "lists no model"),
    ],
)
async def test_a_server_without_models_is_said_to_have_none(
    status: int, body: bytes, why: str
) -> None:
    async def behave(call: Call, reply: Reply) -> None:
        await reply.whole(status, body)

    async with fake_server(behave, key="sk-secret") as server:
        with pytest.raises(CampaignError, match=why) as caught:
            await first_model(server.endpoint)
    assert "sk-secret" not in str(caught.value)


async def test_a_model_is_asked_for_of_a_file_and_refused_where_there_is_but_one(
    started: Started, tmp_path: Path
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("{}")
    async with opened([Source("one", "config", str(path))], model="huge", tell=unheard) as targets:
        assert targets[0].model == "huge"

    with pytest.raises(ValueError, match="--model: is for URLs and files"):
        checked([Source("a", "forebay", "")], key=None, model="huge")


async def test_a_url_without_its_path_is_asked_about() -> None:
    async with fake_server(lists_models) as server:
        at = f"http://127.0.0.1:{server.endpoint.port}"
        with pytest.raises(CampaignError, match=rf"answered 404; is the API at {at}/v1\?"):
            await first_model(Endpoint.parse(at))


async def test_the_demo_key_goes_only_where_it_is_wanted_and_opens() -> None:
    keys = Keys(demo_key="sk-demo")

    async def wants_another(call: Call, reply: Reply) -> None:
        await reply.whole(401, b"{}")

    async with fake_server(lists_models) as open_to_all, fake_server(wants_another) as other:
        url = f"http://127.0.0.1:{open_to_all.endpoint.port}/v1"
        async with opened([Source("a", "url", url)], keys=keys, tell=unheard) as [target]:
            assert target.endpoint.key is None
        assert all("authorization" not in call.headers for call in open_to_all.calls)
        url = f"http://127.0.0.1:{other.endpoint.port}/v1"
        with pytest.raises(CampaignError, match="it wants a key, and FOREBAY_API_KEY has none"):
            async with opened([Source("b", "url", url)], keys=keys, tell=unheard):
                pytest.fail("nobody is let in")
