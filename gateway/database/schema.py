"""The tables, and how a database of an older version is brought up to date.

Times are Unix seconds as floats, money is whole nUSD, nested values are JSON text. Names of tables
and columns are part of what operators may query.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

VERSION = 1
"""Of the tables below."""

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
"""`schema_version`, and `registry_version`, which counts changes to tenants and keys."""

tenants = Table(
    "tenants",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("settings", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("updated_s", Float, nullable=False),
)
"""Tenants made at run time; `settings` is an entry of the configuration's `tenants`, as JSON,
without its id and keys."""

keys = Table(
    "keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("hash", String(80), nullable=False, unique=True),
    Column("name", String(128), nullable=False, default=""),
    Column("limits", Text, nullable=False, default="{}"),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float),
    Column("revoked_s", Float),
    Column("replaced_by", String(64)),
)
"""Keys made at run time, of tenants from either place. `limits` are a key's own, as JSON."""

requests = Table(
    "requests",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("request_id", String(128), nullable=False, index=True),
    Column("kind", String(16), nullable=False),
    Column("started_s", Float, nullable=False),
    Column("finished_s", Float, nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("key", String(64), nullable=False),
    Column("model", String(128), nullable=False),
    Column("endpoint", String(32), nullable=False),
    Column("service_class", String(16), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("status", Integer),
    Column("streamed", Boolean, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_device_tokens", BigInteger, nullable=False),
    Column("cached_dram_tokens", BigInteger, nullable=False),
    Column("cached_redis_tokens", BigInteger, nullable=False),
    Column("written_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("token_hours", Float, nullable=False),
    Column("cost_nusd", BigInteger, nullable=False),
    Column("queue_s", Float),
    Column("ttft_s", Float),
    Column("publish_s", Float),
    Column("tpot_s", Float),
    Column("e2e_s", Float, nullable=False),
    Column("met_slo", Boolean),
    Column("replica", String(256), nullable=False),
    Column("batch", String(64), nullable=False),
)
Index("requests_by_tenant_and_time", requests.c.tenant, requests.c.finished_s)
Index("requests_by_time", requests.c.finished_s)
"""The ledger: one row for every request that was let in, written once it is over. `kind` is
"request", or "storage" for what keeping a named prefix cost. `id` is the gateway's own; the client
may have chosen `request_id`. `met_slo` is null where nothing was promised."""

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("filename", String(512), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float),
)

file_parts = Table(
    "file_parts",
    metadata,
    Column("file", String(64), primary_key=True),
    Column("part", Integer, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
"""A file's bytes, in order."""

batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False, index=True),
    Column("key", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file", String(64), nullable=False),
    Column("output_file", String(64)),
    Column("error_file", String(64)),
    Column("window_s", Float, nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("metadata", Text, nullable=False, default="{}"),
    Column("errors", Text, nullable=False, default="[]"),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float, nullable=False),
    Column("in_progress_s", Float),
    Column("finalizing_s", Float),
    Column("completed_s", Float),
    Column("failed_s", Float),
    Column("expired_s", Float),
    Column("cancelling_s", Float),
    Column("cancelled_s", Float),
    Column("total", Integer, nullable=False, default=0),
    Column("enqueued_tokens", BigInteger, nullable=False, default=0),
    Column("lease_owner", String(64)),
    Column("lease_until_s", Float),
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch", String(64), primary_key=True),
    Column("line", Integer, primary_key=True),
    Column("custom_id", String(512), nullable=False),
    Column("state", String(16), nullable=False),
    Column("tokens", BigInteger, nullable=False, default=0),
    Column("body", Text, nullable=False),
    Column("response", Text),
    Column("error", Text),
    Column("lease_owner", String(64)),
    Column("lease_until_s", Float),
)
Index("batch_lines_by_state", batch_lines.c.batch, batch_lines.c.state)
"""A batch's lines: `pending`, `running`, `completed` or `failed`."""

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at_s", Float, nullable=False, index=True),
    Column("actor", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(256), nullable=False),
    Column("detail", Text, nullable=False, default="{}"),
    Column("client", String(64), nullable=False, default=""),
    Column("request_id", String(128), nullable=False, default=""),
    Column("outcome", String(16), nullable=False),
)
"""What operators did. Rows are only ever added: the database itself refuses to change them."""
