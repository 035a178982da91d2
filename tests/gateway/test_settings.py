"""Settings: what each key takes, what is refused, and how a mistake is said."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gateway.config_file import load_settings
from gateway.credentials import tenant_of
from gateway.settings import ModelSettings, Settings
from gateway.settings_cache import PrefixMessage, TenantCacheSettings
from gateway.settings_errors import ConfigError
from gateway.settings_redis import shown_url, url_secrets
from gateway.settings_units import byte_size, duration_s, whole_number
from gateway.tenants import Tenant, hash_key
from policies.batching import CONTINUOUS, Batching, BatchingMode
from policies.limits import Limits
from policies.service_class import ServiceClass
from policies.slo import Slo

HASH = hash_key("a-key-of-acme")
MINIMAL = f"""
models: [{{name: tiny, path: bundled}}]
tenants: [{{id: acme, keys: [{{hash: "{HASH}"}}]}}]
"""


def load(tmp_path: Path, text: str, environ: Mapping[str, str] | None = None) -> Settings:
    path = tmp_path / "forebay.yaml"
    path.write_text(text)
    return load_settings(path, environ or {})


def mistakes(tmp_path: Path, text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The lines of the error, each without the file's directory. The variable KEY is set."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, {"KEY": "a-key", **(environ or {})})
    assert all("\n" not in message for message in caught.value.messages)
    return [message.replace(f"{tmp_path}/", "") for message in caught.value.messages]


def with_model(line: str) -> str:
    return MINIMAL.replace("path: bundled", f"path: bundled, {line}")


def with_tenant(line: str) -> str:
    return MINIMAL.replace("id: acme,", f"id: acme, {line},")


def test_a_minimal_file_has_every_default(tmp_path: Path) -> None:
    settings = load(tmp_path, MINIMAL)
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert settings.server.body_limit == 16 << 20
    assert settings.server.drain_s == 30
    assert settings.server.metrics == "local"
    model = settings.models[0]
    assert model.path == "bundled"
    assert (model.max_context, model.max_running, model.step_tokens) == (2048, 16, None)
    assert model.replicas.threads is None
    assert model.cache.device is None
    assert (model.cache.dram, model.cache.redis, model.cache.write) == (1 << 30, True, "back")
    redis = settings.redis
    assert (redis.url, redis.for_kv, redis.embedded) == ("embedded", "embedded", True)
    assert (redis.timeout_ms, redis.memory, redis.ttl) == (50, 1 << 30, 7 * 86_400)
    assert (redis.max_connections, redis.encrypt, redis.cluster) == (4, False, False)
    assert settings.shared_prefixes == ()
    tenant = settings.tenants[0]
    assert tenant.models == ("*",)
    assert tenant.limits.concurrency is None
    assert tenant.cache == TenantCacheSettings()
    assert (tenant.cache.scope, tenant.cache.dram_quota) == ("tenant", None)


def test_every_built_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    (tmp_path / "ca.pem").touch()
    (tmp_path / "prefix.txt").write_bytes("Größe\r\n".encode())
    settings = load(
        tmp_path,
        f"""
server:
  host: 0.0.0.0
  port: 9000
  admin_key_env: ADMIN
  secret_env: SECRET
  body_limit: 1.5MiB
  drain_s: 500ms
  keep_alive_s: 2m
  cors_origins: ["https://a.example"]
  trusted_proxies: [10.0.0.0/8, "::1"]
  tls: {{cert: null, key: null}}
  metrics: open
  log_format: json
  log_level: warning
models:
  - name: m
    path: weights.gguf
    device: cuda:1
    dtype: float32
    max_context: 512
    max_running: 4
    max_waiting: 9
    step_tokens: 128
    replicas: {{kind: in-process, count: 1, threads: 3}}
    cache: {{block_tokens: 32, device: 64MiB, dram: 2GiB, redis: false, write: through}}
redis:
  url: rediss://me:pass%40word@redis.example:6380/1
  kv_url: unix:///run/kv.sock?db=3
  timeout_ms: 20
  encrypt: true
  memory: 256MiB
  ttl: 1d
  max_connections: 8
  tls_ca: ca.pem
tenants:
  - id: acme
    keys: [{{hash: "{HASH}"}}]
    models: [m]
    limits: {{concurrency: 3}}
    cache:
      scope: user
      device_floor: 1MiB
      device_quota: 2MiB
      dram_floor: 3MiB
      dram_quota: 4MiB
      redis_quota: 5MiB
shared_prefixes:
  - {{text: "Once upon a time"}}
  - {{models: ["m*"], messages: [{{role: system, content: "Be kind."}}]}}
  - {{file: prefix.txt}}
""",
    )
    server = settings.server
    assert (server.host, server.port, server.body_limit) == ("0.0.0.0", 9000, 3 << 19)
    assert (server.drain_s, server.keep_alive_s) == (0.5, 120.0)
    assert [str(network) for network in server.trusted_proxies] == ["10.0.0.0/8", "::1/128"]
    model = settings.models[0]
    assert model.path == tmp_path / "weights.gguf"  # relative to the file
    assert (model.device, model.cache.block_tokens, model.cache.device) == ("cuda:1", 32, 64 << 20)
    assert (model.replicas.threads, model.max_waiting) == (3, 9)
    assert settings.tenants[0].limits.concurrency == 3
    assert (model.cache.dram, model.cache.redis, model.cache.write) == (2 << 30, False, "through")
    redis = settings.redis
    assert redis.url == "rediss://me:pass%40word@redis.example:6380/1"
    assert (redis.for_kv, redis.embedded) == ("unix:///run/kv.sock?db=3", False)
    assert (redis.timeout_ms, redis.encrypt, redis.memory) == (20, True, 256 << 20)
    assert (redis.ttl, redis.max_connections) == (86_400, 8)
    assert redis.tls_ca == tmp_path / "ca.pem"
    share = settings.tenants[0].cache
    assert share.scope == "user"
    assert (share.device_floor, share.device_quota) == (1 << 20, 2 << 20)
    assert (share.dram_floor, share.dram_quota, share.redis_quota) == (3 << 20, 4 << 20, 5 << 20)
    told, chat, read = settings.shared_prefixes
    assert (told.models, told.text, told.messages) == (("*",), "Once upon a time", None)
    assert (chat.models, chat.text) == (("m*",), None)
    assert chat.messages == (PrefixMessage(role="system", content="Be kind."),)
    assert (read.text, read.file) == ("Größe\r\n", None)  # as it is, line ends included


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = load(tmp_path, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 1


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("quantize: int8", "quantize"),
        ("speculate: {method: draft}", "speculate.method"),
    ],
)
def test_model_keys_of_later_features_are_refused_by_name(
    tmp_path: Path, line: str, key: str
) -> None:
    expected = f"forebay.yaml: models[0].{key}: not supported yet; leave it out"
    assert mistakes(tmp_path, with_model(line)) == [expected]


def test_what_is_promised_to_a_tenant(tmp_path: Path) -> None:
    text = with_tenant(
        "class: interactive, weight: 2, models: [small*], "
        "limits: {rpm: 600, tpm: 200000, concurrency: 16, cached_weight: 0.25, "
        "enqueued_tokens: 1000, budget_usd: {amount: 50.10, per: day}, models: {tiny: {rpm: 6}}}, "
        "slo: {ttft_ms: 500, tpot_ms: 120, target: 0.99, on_overload: queue, max_queue_ms: 2000}"
    )
    tenant = tenant_of(load(tmp_path, text).tenants[0])
    assert tenant == Tenant(
        id="acme",
        models=("small*",),
        service_class=ServiceClass.INTERACTIVE,
        weight=2.0,
        limits=Limits(600, 200_000, 16, 50_100_000_000, "day"),
        model_limits={"tiny": Limits(rpm=6)},
        cached_weight=0.25,
        enqueued_tokens=1000,
        slo=Slo(0.5, 0.12, 0.99, "queue", None, 2.0),
    )


def test_a_tenant_of_whom_nothing_is_said_has_no_limits_and_no_promise(tmp_path: Path) -> None:
    assert tenant_of(load(tmp_path, MINIMAL).tenants[0]) == Tenant(id="acme")


@pytest.mark.parametrize(
    ("line", "where", "message"),
    [
        ("class: gold", "class", "must be one of 'interactive', 'standard', 'batch'"),
        ("clas: batch", "clas", "unknown key; did you mean class?"),
        ("service_class: batch", "service_class", "unknown key"),
        ("weight: 0", "weight", "must be at least 0.001"),
        ("limits: {rpm: 0}", "limits.rpm", "must be at least 1"),
        ("limits: {rpm: 1.5}", "limits.rpm", "must be a whole number"),
        ("limits: {rmp: 1}", "limits.rmp", "unknown key; did you mean rpm?"),
        ("limits: {budget_usd: 5}", "limits.budget_usd", "must be a mapping"),
        (
            "limits: {budget_usd: {amount: five}}",
            "limits.budget_usd.amount",
            "must be a number of US dollars",
        ),
        (
            "limits: {budget_usd: {amount: -1}}",
            "limits.budget_usd.amount",
            "must be between 0 and 1000000 US dollars",
        ),
        ("slo: {target: 1}", "slo.target", "must be less than 1"),
        (
            "slo: {on_overload: downgrade}",
            "slo",
            "downgrade_to and on_overload: downgrade are needed together",
        ),
        (
            "slo: {on_overload: downgrade, downgrade_to: nope}",
            None,
            "item 0 has a slo.downgrade_to that is no model's own name",
        ),
        (
            "limits: {models: {tinny: {rpm: 1}}}",
            None,
            "item 0 has a name in limits.models that is no model's own name",
        ),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(
    tmp_path: Path, line: str, where: str | None, message: str
) -> None:
    place = "tenants" if where is None else f"tenants[0].{where}"
    said = mistakes(tmp_path, with_tenant(line))
    assert len(said) == 1
    assert said[0].startswith(f"forebay.yaml: {place}: {message}")


def test_a_price_is_exact(tmp_path: Path) -> None:
    text = with_model("price: {input: 0.1, cached_input: 0.01, output: 0.4}")
    price = load(tmp_path, text).models[0].price.as_price()
    assert (price.input, price.output) == (Decimal("0.1"), Decimal("0.4"))
    assert price.request_nusd(uncached_tokens=1, cached_tokens=1, output_tokens=1) == 510
    text = with_model("price: {input: 0.1}")
    assert load(tmp_path, text).models[0].price.as_price().cached_input == Decimal("0.1")


def test_where_what_outlives_the_process_is_kept(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL).database.url == "sqlite"
    url = "postgresql://forebay:secret@db:5432/forebay"
    assert load(tmp_path, MINIMAL + f"database: {{url: {url}}}").database.url == url
    said = mistakes(tmp_path, MINIMAL + "database: {url: 'mysql://u:pw@h/d'}")
    assert said == [
        "forebay.yaml: database.url: must be sqlite or a URL that begins with postgresql://"
    ]


def test_values_that_say_off_are_accepted(tmp_path: Path) -> None:
    text = with_model(
        "quantize: none, speculate: {method: none}, tokenizer: null, "
        "cache: {dram: off, redis: off}, replicas: {kind: in-process, count: 1}"
    ).replace("id: acme,", "id: acme, slo: null, limits: {rpm: null}, cache: {dram_floor: 0},")
    text += "redis: {url: off, kv_url: null, encrypt: false}\nshared_prefixes: []\ndatabase:\n"
    settings = load(tmp_path, text)
    cache = settings.models[0].cache
    assert (cache.dram, cache.redis, settings.redis.for_kv) == (0, False, "off")


def test_replicas_may_be_several_processes(tmp_path: Path) -> None:
    replicas = load(tmp_path, with_model("replicas: {kind: process, count: 2}")).models[0].replicas
    assert (replicas.kind, replicas.count, replicas.hang_s) == ("process", 2, 5.0)


def test_batching_is_continuous_unless_another_way_is_asked_for(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL).models[0].batching.policy == CONTINUOUS
    text = with_model("batching: {mode: dynamic, size: 4, window_ms: 20}")
    model = load(tmp_path, text).models[0]
    assert model.batching.policy == Batching(BatchingMode.DYNAMIC, 4, 0.02)
    told = ModelSettings.model_validate_json(model.model_dump_json(exclude_unset=True))
    assert told.batching == model.batching  # as a worker process is told


REMOTE = """
models:
  - name: big
    remote: [{remote}]
{more}
tenants: [{{id: acme, keys: [{{env: KEY}}]}}]
"""


def remote(fields: str, more: str = "") -> str:
    return REMOTE.format(remote="{url: 'http://h:1/v1', " + fields + "}", more=more)


def test_a_remote_model_names_its_servers(tmp_path: Path) -> None:
    text = remote(
        "engine: vllm, api_key_env: BIG_KEY, model: served, kv_events: 'tcp://h:5557'",
        "    tokenizer: bundled\n    aliases: [huge]",
    )
    model = load(tmp_path, text).models[0]
    [server] = model.remote
    assert (model.path, model.tokenizer, model.aliases) == (None, "bundled", ("huge",))
    assert (server.url, server.engine, server.model) == ("http://h:1/v1", "vllm", "served")
    assert server.shared_cache == "refuse"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            with_model("replicas: {hang_s: 9}"),
            "models[0].replicas: hang_s is for kind: process",
        ),
        (
            remote("engine: openai"),
            "models[0].remote[0]: an engine of kind openai cannot keep tenants apart in its prompt "
            "cache: say shared_cache: accept if they may share it",
        ),
        (
            remote("engine: llama.cpp, kv_events: 'tcp://h:1'"),
            "models[0].remote[0]: kv_events are published by engine: vllm only",
        ),
        (
            remote("engine: vllm, kv_events: 'tcp://h:1'"),
            "models[0]: kv_events tell of tokens: they need the model's tokenizer",
        ),
        (
            remote("engine: vllm", "    dtype: float32"),
            "models[0]: dtype is for models that run here; a remote one has its own",
        ),
        (
            remote("engine: vllm").replace("http://h:1/v1", "http://user:pass@h/v1"),
            "models[0].remote[0].url: must be a URL such as http://127.0.0.1:9001/v1, "
            "without credentials",
        ),
        (
            remote("engine: vllm", "    fallbacks: [other]"),
            "models: item 0 has a fallback that is no other model's name",
        ),
        (
            with_model("tokenizer: bundled"),
            "models[0]: tokenizer is for remote models; one that runs here brings its own",
        ),
        (
            with_model("remote: [{url: 'http://h', engine: vllm}]"),
            "models[0]: needs either path (run here) or remote (run elsewhere)",
        ),
    ],
)
def test_what_replicas_cannot_have(tmp_path: Path, text: str, message: str) -> None:
    assert mistakes(tmp_path, text) == [f"forebay.yaml: {message}"]


def test_a_server_is_the_same_however_its_host_and_port_are_written(tmp_path: Path) -> None:
    twice = "models[0]: remote lists one host and port twice; replicas are named by them"
    for one, other in (("http://h", "http://H:80"), ("https://h:443", "https://H/v1")):
        servers = ", ".join(f"{{url: '{url}', engine: vllm}}" for url in (one, other))
        text = remote("engine: vllm").replace("{url: 'http://h:1/v1', engine: vllm}", servers)
        assert mistakes(tmp_path, text) == [f"forebay.yaml: {twice}"]
    text = remote("engine: vllm").replace("http://h:1/v1", "http://[::80]:80/v1")
    assert load(tmp_path, text).models[0].remote[0].host == "[::80]"


def test_a_generic_server_may_be_shared_on_purpose(tmp_path: Path) -> None:
    settings = load(tmp_path, remote("engine: openai, shared_cache: accept"))
    assert settings.models[0].remote[0].shared_cache == "accept"


def test_an_unknown_routing_policy_is_refused(tmp_path: Path) -> None:
    [message] = mistakes(tmp_path, MINIMAL + "routing: {policy: predicted-tft}")
    assert message.startswith("forebay.yaml: routing.policy: ")
    assert "predicted-ttft" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("server: {prot: 1}", "server.prot: unknown key; did you mean port?"),
        ("sever: {}", "sever: unknown key; did you mean server?"),
        ("redis: {ulr: off}", "redis.ulr: unknown key; did you mean url?"),
        ("server: {port: 99999}", "server.port: must be at most 65535"),
        ("server: {port: true}", "server.port: must be a whole number"),
        ("server: {port: null}", "server.port: must be a whole number"),
        ("server: {metrics: all}", "server.metrics: must be one of 'local', 'admin-key', 'open'"),
        ("server: {drain_s: -1}", "server.drain_s: must be a duration such as"),
        ("server: {body_limit: 16XB}", "server.body_limit: must be a size such as"),
        ("server: {cors_origins: [a.example]}", "server.cors_origins: item 0 must be"),
        ("server: {trusted_proxies: [me]}", "server.trusted_proxies: item 0 must be an IP"),
        ("server: {tls: {cert: /x}}", "server.tls: cert and key are needed together"),
        ("server: [1]", "server: must be a mapping"),
        ("server: {host: 1}", "server.host: must be text"),
        ("redis: {url: embeded}", "redis.url: must be embedded, off, redis://HOST"),
        ("redis: {url: 1}", "redis.url: must be embedded"),
        ("redis: {kv_url: 'redis://h:x'}", "redis.kv_url: must be embedded"),
        ("redis: {timeout_ms: 0}", "redis.timeout_ms: must be at least 1"),
        ("redis: {max_connections: 2}", "redis.max_connections: must be at least 3"),
        ("redis: {encrypt: 1}", "redis.encrypt: must be true or false"),
        ("redis: {memory: 1MiB}", "redis.memory: must be at least 16777216"),
        ("redis: {ttl: 2y}", "redis.ttl: must be a duration"),
        ("redis: {tls_ca: ca.pem}", "redis: tls_ca is only for a rediss:// url"),
        ("redis: {url: 'rediss://h', tls_ca: ca.pem}", "redis.tls_ca: no such file"),
        ("redis: {cluster: true}", "redis: cluster needs a redis:// or rediss:// url"),
        ("redis: {url: 'redis://h/1', cluster: true}", "redis: cluster has no database but 0"),
        ("shared_prefixes: [x]", "shared_prefixes[0]: must be a mapping"),
        ("shared_prefixes: [{}]", "shared_prefixes[0]: must have exactly one of text, messages"),
        (
            "shared_prefixes: [{text: a, file: b}]",
            "shared_prefixes[0]: must have exactly one of text, messages and file",
        ),
        ("shared_prefixes: [{text: ''}]", "shared_prefixes[0].text: must not be empty"),
        ("shared_prefixes: [{messages: []}]", "shared_prefixes[0].messages: must not be empty"),
        ("shared_prefixes: [{file: 3}]", "shared_prefixes[0].file: must be a path"),
        ("shared_prefixes: [{file: no.txt}]", "shared_prefixes[0].file: no such file: "),
        ("shared_prefixes: [{text: a, models: [x]}]", "shared_prefixes: item 0 is for none of"),
    ],
)
def test_a_mistake_is_named_by_its_key(tmp_path: Path, line: str, message: str) -> None:
    [said] = mistakes(tmp_path, MINIMAL + line)
    assert said.startswith(f"forebay.yaml: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_running: 64, step_tokens: 32", "models[0]: step_tokens must be at least max_running"),
        ("cache: {block_tokens: 24}", "models[0].cache.block_tokens: must be a multiple of 16"),
        (
            "max_running: 4, batching: {mode: static}",
            "models[0]: batching.size must be at most max_running",
        ),
        ("batching: {size: 4}", "models[0].batching: size is for mode: static or dynamic"),
        ("batching: {mode: window}", "models[0].batching.mode: must be one of"),
        (
            "batching: {mode: dynamic, window_ms: -1}",
            "models[0].batching.window_ms: must be at least 0",
        ),
        ("device: gpu", "models[0].device: must be auto, cpu, cuda or cuda:N"),
        ("dtype: int8", "models[0].dtype: must be one of"),
        ("replicas: {threads: 0}", "models[0].replicas.threads: must be at least 1"),
        ("cache: {dram: x}", "models[0].cache.dram: must be a size such as"),
        ("cache: {redis: 2}", "models[0].cache.redis: must be true or false"),
        ("cache: {write: both}", "models[0].cache.write: must be one of 'back', 'through'"),
    ],
)
def test_a_models_mistake_is_named_by_its_key(tmp_path: Path, line: str, message: str) -> None:
    [said] = mistakes(tmp_path, with_model(line))
    assert said.startswith(f"forebay.yaml: {message}")


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ("device_quota: x", "tenants[0].cache.device_quota: must be a size such as"),
        (
            "device_floor: 2MiB, device_quota: 1MiB",
            "tenants[0].cache: device_floor must not be more than device_quota",
        ),
        (
            "dram_floor: 2MiB, dram_quota: 0",
            "tenants[0].cache: dram_floor must not be more than dram_quota",
        ),
        (
            "device_floor: 17MiB",
            "tenants: every device_floor together is more than half of models[0].cache.device",
        ),
        (
            "dram_floor: 33MiB",
            "tenants: every dram_floor together is more than half of models[0].cache.dram",
        ),
    ],
)
def test_floors_and_quotas_that_cannot_be_kept_are_refused(
    tmp_path: Path, share: str, message: str
) -> None:
    text = with_model("cache: {device: 64MiB, dram: 128MiB}").replace(
        "id: acme,", f"id: acme, cache: {{{share}}},"
    )
    other = f'{{id: b, keys: [{{hash: "{hash_key("b")}"}}], cache: {{%s}}}}'
    text = text.replace("]}]\n", "]}, " + other % "device_floor: 16MiB, dram_floor: 32MiB" + "]\n")
    [said] = mistakes(tmp_path, text)
    assert said.startswith(f"forebay.yaml: {message}")


def test_floors_may_take_half_of_a_tier_and_anything_of_one_that_is_off(tmp_path: Path) -> None:
    text = with_model("cache: {device: 64MiB, dram: 0}").replace(
        "id: acme,", "id: acme, cache: {device_floor: 32MiB, dram_floor: 9GiB},"
    )
    assert load(tmp_path, text).tenants[0].cache.device_floor == 32 << 20


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis.example",
        "redis://:pa55%2F@10.0.0.1:6379/2",
        "rediss://user:pa55@[::1]:6380?db=4",
        "unix:///run/redis.sock",
        "unix://user:pa55@/run/redis.sock?db=1",
    ],
)
def test_redis_urls_are_taken_from_the_environment(tmp_path: Path, url: str) -> None:
    settings = load(tmp_path, MINIMAL, {"FOREBAY_REDIS__URL": url})
    assert settings.redis.url == url
    assert "pa55" not in repr(settings)
    assert "pa55" not in shown_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "secret",
        "http://h/secret",
        "redis://",
        "redis:///secret",
        "redis://:sec ret@h",
        "redis://:secret/x@h",
        "redis://:secret#x@h",
        "redis://:secret?x@h",
        "redis://h:secret",
        "redis://h/secret",
        "redis://h?password=secret",
        "redis://h/1?db=2",
        "redis://[secret",
        "unix://secret/run/x",
        "unix://",
    ],
)
def test_no_redis_urls_and_nothing_of_them_is_echoed(tmp_path: Path, url: str) -> None:
    said = mistakes(tmp_path, MINIMAL, {"FOREBAY_REDIS__URL": url})
    assert [line.split(":")[0] for line in said] == ["FOREBAY_REDIS__URL"]
    assert "secret" not in said[0]


def test_a_url_is_shown_and_its_passwords_are_known() -> None:
    url = "redis://me:p%40ss@h:1/2"
    assert shown_url(url) == "redis://me:***@h:1/2"
    assert shown_url("unix:///x?db=1") == "unix:///x?db=1"
    assert shown_url("redis://p%40ss@h") == "redis://***@h"
    assert url_secrets(url) == {"p%40ss", "p@ss"}
    assert url_secrets("redis://h") == url_secrets("embedded") == frozenset()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty: "), (b"\xff", "is not UTF-8 text: "), (None, "no such file: ")],
)
def test_a_prefix_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "prefix.txt").write_bytes(content)
    said = mistakes(tmp_path, MINIMAL + "shared_prefixes: [{file: prefix.txt}]")
    assert said == [f"forebay.yaml: shared_prefixes[0].file: {message}prefix.txt"]


def test_tiers_are_switched_off_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("once")
    environ = {
        "FOREBAY_REDIS__URL": "off",
        "FOREBAY_MODELS__0__CACHE__DRAM": "off",
        "FOREBAY_MODELS__0__CACHE__REDIS": "off",
        "FOREBAY_TENANTS__0__CACHE__REDIS_QUOTA": "1MiB",
        "FOREBAY_SHARED_PREFIXES__0__FILE": str(tmp_path / "p.txt"),
    }
    settings = load(tmp_path, MINIMAL, environ)
    cache = settings.models[0].cache
    assert (settings.redis.url, cache.dram, cache.redis) == ("off", 0, False)
    assert settings.tenants[0].cache.redis_quota == 1 << 20
    assert settings.shared_prefixes[0].text == "once"


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    text = with_model("dtype: x, quantize: int4") + "server: {port: x}\n"
    assert len(mistakes(tmp_path, text)) == 3


def test_names_and_ids_are_unique(tmp_path: Path) -> None:
    text = MINIMAL.replace("models: [", "models: [{name: tiny, path: bundled}, ")
    assert mistakes(tmp_path, text) == ["forebay.yaml: models: items 0 and 1 have the same name"]


@pytest.mark.parametrize(
    "keys",
    [
        '["sk-plain-secret"]',
        "[{key: sk-plain-secret}]",
        "[{sk-plain-secret: x}]",
        "[{hash: sk-plain-secret}]",
        "sk-plain-secret",
        '[{env: "sk-plain-secret"}]',
    ],
)
def test_plain_keys_are_refused_and_not_echoed(tmp_path: Path, keys: str) -> None:
    text = MINIMAL.replace(f'[{{hash: "{HASH}"}}]', keys)
    said = mistakes(tmp_path, text)
    assert said
    assert "sk-plain-secret" not in "".join(said)


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    text = MINIMAL.replace("path: bundled", "path: nothing.gguf")
    assert mistakes(tmp_path, text) == [
        "forebay.yaml: models[0].path: no such file or directory: nothing.gguf"
    ]


@pytest.mark.parametrize("number", ["", "abc", "-1", "1e3", "0x10", " 80", "1_000", "8000.0"])
@pytest.mark.parametrize("variable", ["FOREBAY_SERVER__PORT", "FOREBAY_MODELS__0__MAX_CONTEXT"])
def test_a_bad_number_in_the_environment_names_its_variable(
    tmp_path: Path, variable: str, number: str
) -> None:
    [said] = mistakes(tmp_path, MINIMAL, {variable: number})
    assert said.startswith(f"{variable}: must be ")
    assert len(number) < 2 or number not in said


@pytest.mark.parametrize("text", ["", "abc", "-1", "1e3"])
def test_a_bad_duration_or_size_in_the_environment_names_its_variable(
    tmp_path: Path, text: str
) -> None:
    variables = {"FOREBAY_SERVER__DRAIN_S": text, "FOREBAY_SERVER__BODY_LIMIT": text}
    said = mistakes(tmp_path, MINIMAL, variables)
    assert sorted(line.split(":")[0] for line in said) == sorted(variables)


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        MINIMAL + "server: {port: 1, cors_origins: ['https://a.example']}",
        {
            "FOREBAY_SERVER__PORT": "8123",
            "FOREBAY_SERVER__CORS_ORIGINS": '["https://b.example"]',
            "FOREBAY_SERVER__BODY_LIMIT": "2MiB",
            "FOREBAY_MODELS__0__DTYPE": "float32",
            "FOREBAY_MODELS__0__REPLICAS__THREADS": "2",
            "FOREBAY_TENANTS__0__LIMITS__CONCURRENCY": "null",
            "FOREBAY_TENANTS__1": f'{{id: b, keys: [{{hash: "{hash_key("b")}"}}]}}',
            "FOREBAY_SECRET": "not a setting",
            "PATH": "/bin",
        },
    )
    assert settings.server.port == 8123
    assert settings.server.cors_origins == ("https://b.example",)
    assert settings.server.body_limit == 2 << 20
    assert settings.models[0].dtype == "float32"
    assert settings.models[0].replicas.threads == 2
    assert settings.tenants[0].limits.concurrency is None
    assert [tenant.id for tenant in settings.tenants] == ["acme", "b"]


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("FOREBAY_SEVER__PORT", "names no setting; did you mean FOREBAY_SERVER__PORT?"),
        ("FOREBAY_SERVER__PROT", "names no setting; did you mean FOREBAY_SERVER__PORT?"),
        ("FOREBAY_SERVER__PORT__X", "names no setting"),
        ("FOREBAY_MODELS__5__NAME", "names an item that is not there; the next index may be added"),
        ("FOREBAY_MODELS__X__NAME", "names no setting"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused(
    tmp_path: Path, variable: str, message: str
) -> None:
    said = mistakes(tmp_path, MINIMAL, {variable: "redis://x"})
    assert said[0].startswith(f"{variable}: {message}")


def test_files_and_keys_are_looked_at_beside_what_is_misspelt(tmp_path: Path) -> None:
    text = """
models:
  - {name: m, path: bundeld}
  - {name: n, remote: [{url: 'http://h/v1', engine: vllm, api_key_env: FAR}]}
tenants:
  - {id: a, class: interctive, keys: [{env: UNSET}, {env: KEY}], limits: {rmp: 3}}
server: {tls: {cert: none.pem, key: none.pem}}
routing: {policy: luck}
"""
    said = mistakes(tmp_path, text)
    places = [line.split(": ")[1] for line in said if line.startswith("forebay.yaml: ")]
    assert sorted(places) == [
        "models[0].path",
        "routing.policy",
        "server.tls.cert",
        "server.tls.key",
        "tenants[0].class",
        "tenants[0].limits.rmp",
    ]
    assert "forebay.yaml: models[0].path: no such file or directory: bundeld" in said
    assert said[-2:] == [
        "UNSET: is not set, and tenants[0].keys[0] takes its key from it",
        "FAR: is not set, and models[1].remote[0] takes its key from it",
    ]


@pytest.mark.parametrize(
    "entry", ["{env: sk-secret}", "sk-secret", "{env: [sk-secret]}", "{env: SKSECRET, hsh: x}"]
)
def test_what_is_no_variable_is_not_looked_up_and_not_shown(tmp_path: Path, entry: str) -> None:
    text = f"models: [{{name: m, path: bundled}}]\ntenants: [{{id: a, keys: [{entry}]}}]"
    [line] = mistakes(tmp_path, text)
    assert line.startswith("forebay.yaml: tenants[0].keys[0]")
    assert "secret" not in line.lower()


def test_a_variable_that_the_file_names_may_be_called_anything(tmp_path: Path) -> None:
    text = MINIMAL.replace(f'hash: "{HASH}"', "env: FOREBAY_ACME__KEY")
    settings = load(tmp_path, text, {"FOREBAY_ACME__KEY": "k"})
    assert settings.tenants[0].keys[0].env == "FOREBAY_ACME__KEY"


def test_flags_win_over_the_environment_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text(MINIMAL)
    environ = {"FOREBAY_SERVER__PORT": "1"}
    assert load_settings(path, environ, {"--port": "2"}).server.port == 2
    with pytest.raises(ConfigError) as caught:
        load_settings(path, environ, {"--port": "x"})
    assert caught.value.messages == ("--port: must be a whole number",)


def test_the_model_flag_replaces_the_models(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text(MINIMAL)
    weights = tmp_path / "my model.Q8_0.gguf"
    weights.touch()
    settings = load_settings(
        path, {"FOREBAY_MODELS__0__DTYPE": "float32"}, {"--model": str(weights)}
    )
    [model] = settings.models
    assert (model.name, model.path, model.dtype) == ("my-model.Q8_0", weights, "float32")
    with pytest.raises(ConfigError, match=r"^--model: no such file or directory: /nothing"):
        load_settings(path, {}, {"--model": "/nothing"})


def test_without_a_file_the_bundled_model_is_served_to_a_demo_tenant(tmp_path: Path) -> None:
    environ = {"FOREBAY_STATE_DIR": str(tmp_path / "state")}
    settings = load_settings(None, environ)
    assert settings.models[0].path == "bundled"
    assert settings.tenants[0].id == "demo"
    assert settings == load_settings(None, environ)  # the key is made once


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**15 - 1))
def test_plain_digits_are_the_number_of_bytes_and_the_number(number: int) -> None:
    assert byte_size(str(number)) == byte_size(number) == number
    assert whole_number(str(number)) == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16MiB", 16 << 20), ("1GiB", 1 << 30), ("1.5KiB", 1536), ("2 KB", 2000), ("7B", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert byte_size(text) == expected


@pytest.mark.parametrize("value", ["", "x", "1e3", "-1", "1.5", "MiB", True, -1, 1.5, None, []])
def test_no_sizes(value: object) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        byte_size(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("30", 30), (30, 30), (0.5, 0.5), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("7d", 604_800)],
)
def test_durations(value: object, expected: float) -> None:
    assert duration_s(value) == expected


@pytest.mark.parametrize(
    "value", ["", "x", "1e3", "-1", "1w", True, -1, float("inf"), float("nan")]
)
def test_no_durations(value: object) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        duration_s(value)
