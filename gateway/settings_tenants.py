"""What may be set about tenants: keys, limits, promises, prices, and where it is written down."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gateway.settings_cache import TenantCacheSettings
from gateway.settings_section import Section, variable_name
from gateway.settings_units import LongDurationS, Switch, Whole
from policies.limits import Limits
from policies.pricing import NUSD, Price
from policies.service_class import ServiceClass
from policies.slo import OnOverload, Slo

TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
TENANT_ID_RULE = "must be 1 to 64 letters, digits or any of . _ @ -"
KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_DATABASE = re.compile(r"sqlite|postgresql://\S+")
_MOST_USD = Decimal(1_000_000)


def _amount(value: Any) -> Decimal:
    """US dollars as they are written, without a float's rounding."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise ValueError("must be a number of US dollars")
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        raise ValueError("must be a number of US dollars") from None
    if not amount.is_finite() or not 0 <= amount <= _MOST_USD:
        raise ValueError(f"must be between 0 and {_MOST_USD} US dollars")
    return amount


Usd = Annotated[Decimal, BeforeValidator(_amount)]


class PriceSettings(Section):
    """A model's price in US dollars per million tokens; see `policies.pricing.Price`."""

    input: Usd = Decimal(0)
    cached_input: Usd | None = None
    output: Usd = Decimal(0)
    cache_write: Usd = Decimal(0)
    batch_discount: Annotated[Usd, Field(le=1)] = Decimal("0.5")
    storage: Usd = Decimal(0)

    def as_price(self) -> Price:
        """What is charged; cached tokens cost what others do unless something is said of them."""
        return Price(
            input=self.input,
            cached_input=self.input if self.cached_input is None else self.cached_input,
            output=self.output,
            cache_write=self.cache_write,
            batch_discount=self.batch_discount,
            storage=self.storage,
        )


class DatabaseSettings(Section):
    """Where runtime tenants and keys, the ledger, batches and the audit trail are kept: `sqlite`, a
    file in the state directory, or a PostgreSQL that several gateways share."""

    url: Annotated[str, Field(repr=False)] = "sqlite"

    @field_validator("url")
    @classmethod
    def _is_a_database(cls, value: str) -> str:
        if not _DATABASE.fullmatch(value):
            raise ValueError("must be sqlite or a URL that begins with postgresql://")
        return value


class LedgerSettings(Section):
    """How long a request's row is kept. Monthly budgets are sums of rows, hence the least."""

    retention: Annotated[LongDurationS, Field(ge=32 * 86_400)] = 90 * 86_400.0


class BatchSettings(Section):
    """`concurrency` is how many lines of batches one gateway runs at once, `max_lines` and
    `max_bytes` bound one input file, `file_ttl` is how long files are kept."""

    concurrency: Annotated[Whole, Field(ge=1, le=1024)] = 4
    max_lines: Annotated[Whole, Field(ge=1, le=1_000_000)] = 50_000
    max_bytes: Annotated[Whole, Field(ge=1024, le=1 << 30)] = 200 << 20
    file_ttl: Annotated[LongDurationS, Field(ge=3600)] = 30 * 86_400.0


class BudgetSettings(Section):
    """US dollars for a calendar day or month in UTC."""

    amount: Usd
    per: Literal["day", "month"] = "month"


class LimitSettings(Section):
    """Ceilings of a key, or of a model within a tenant; null is none. `rpm` and `tpm` are requests
    and tokens in any 60 seconds, `concurrency` requests in flight."""

    rpm: Annotated[Whole, Field(ge=1)] | None = None
    tpm: Annotated[Whole, Field(ge=1)] | None = None
    concurrency: Annotated[Whole, Field(ge=1)] | None = None
    budget_usd: BudgetSettings | None = None

    def as_limits(self) -> Limits:
        """What is enforced."""
        budget = self.budget_usd
        return Limits(
            rpm=self.rpm,
            tpm=self.tpm,
            concurrency=self.concurrency,
            budget_nusd=None if budget is None else int(budget.amount * NUSD),
            budget_per="month" if budget is None else budget.per,
        )


class TenantLimitSettings(LimitSettings):
    """A tenant's ceilings. A cached token counts as `cached_weight` of one against `tpm`; `models`
    has further ceilings by model; batches may hold `enqueued_tokens` that have not run."""

    cached_weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    enqueued_tokens: Annotated[Whole, Field(ge=1)] | None = None
    models: Mapping[str, LimitSettings] = {}


class SloSettings(Section):
    """See `policies.slo.Slo`; times are milliseconds."""

    ttft_ms: Annotated[float, Field(gt=0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0)] | None = None
    target: Annotated[float, Field(gt=0, lt=1)] = 0.95
    on_overload: OnOverload = "reject"
    downgrade_to: str | None = None
    max_queue_ms: Annotated[float, Field(ge=0, le=600_000)] = 10_000.0

    @model_validator(mode="after")
    def _downgrades_somewhere(self) -> SloSettings:
        if (self.on_overload == "downgrade") != (self.downgrade_to is not None):
            raise ValueError("downgrade_to and on_overload: downgrade are needed together")
        return self

    def as_slo(self) -> Slo:
        """What is promised."""
        return Slo(
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
            target=self.target,
            on_overload=self.on_overload,
            downgrade_to=self.downgrade_to,
            max_queue_s=self.max_queue_ms / 1e3,
        )


class KeySettings(Section):
    """One key of a tenant: the `hash` that `forebay keys` prints, or the environment variable that
    holds the key. `limits` are its own, within its tenant's."""

    hash: str | None = None
    env: str | None = None
    limits: LimitSettings = LimitSettings()

    @model_validator(mode="before")
    @classmethod
    def _is_no_plain_key(cls, value: Any) -> Any:
        """A wrong shape here is most likely a key in the clear, so that nothing of it is shown."""
        if not isinstance(value, dict) or not set(value) <= {"hash", "env", "limits"}:
            raise ValueError(
                "must be {hash: ...} or {env: VARIABLE}; plain keys are refused: "
                "run `forebay keys hash` and paste what it prints"
            )
        if len([name for name in ("hash", "env") if value.get(name) is not None]) != 1:
            raise ValueError("must have either hash or env")
        return value

    @field_validator("hash")
    @classmethod
    def _is_a_hash(cls, value: str | None) -> str | None:
        if value is not None and not KEY_HASH.fullmatch(value):
            raise ValueError(
                "must be sha256: and 64 lower-case hex digits; `forebay keys hash` prints it"
            )
        return value

    @field_validator("env")
    @classmethod
    def _is_a_variable(cls, value: str | None) -> str | None:
        return value if value is None else variable_name(value)


class TenantSettings(Section):
    """One tenant. `models` are glob patterns of model names. Tenants share a class by `weight`.
    `receipt` is whether its answers say in headers which replica gave them, and what that took.
    Keys may also be made while forebay runs."""

    id: str
    keys: tuple[KeySettings, ...] = ()
    models: tuple[str, ...] = ("*",)
    service_class: Annotated[ServiceClass, Field(alias="class")] = ServiceClass.STANDARD
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    limits: TenantLimitSettings = TenantLimitSettings()
    slo: SloSettings = SloSettings()
    cache: TenantCacheSettings = TenantCacheSettings()
    receipt: Switch = True

    def strange_model(self, models: Collection[str]) -> str | None:
        """The field that names a model which is none of `models`; None if all are."""
        if self.slo.downgrade_to not in {None, *models}:
            return "slo.downgrade_to"
        strange = next((name for name in self.limits.models if name not in models), None)
        return None if strange is None else "name in limits.models"

    @field_validator("id")
    @classmethod
    def _is_an_id(cls, value: str) -> str:
        if not TENANT_ID.fullmatch(value):
            raise ValueError(TENANT_ID_RULE)
        return value
