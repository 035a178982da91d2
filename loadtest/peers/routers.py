"""vllm-router, sglang-router and smg: routers in Rust, each a wheel with a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.peers.peer import HOST, Launch
from loadtest.peers.place import Place
from loadtest.peers.workshop import Workshop
from loadtest.wire.connection import Endpoint

_READY_S = 60.0
_POLICY = "cache_aware"
"""Their default, and the one that does what forebay's router does: looks for the prefix."""


@dataclass(frozen=True, slots=True)
class WheelRouter:
    """A router that pip installs. `arguments` follow its command, `warnings_only` is the log level
    that writes no line per request."""

    name: str
    version: str
    arguments: tuple[str, ...]
    warnings_only: str

    @property
    def home(self) -> str:
        """Its own: two of them install the same Python package."""
        return self.name

    @property
    def recipe(self) -> str:
        """The wheel."""
        return f"{self.name}=={self.version}"

    def install(self, workshop: Workshop) -> None:
        """An environment and the wheel in it."""
        workshop.make_venv()
        workshop.pip("install", self.recipe)

    def launch(
        self, place: Place, *, upstreams: Sequence[Endpoint], port: int, metrics_port: int
    ) -> Launch:
        """Metrics have a port of their own, which is a fixed one by default: a second router
        would find it taken."""
        workers = [f"{'https' if at.tls else 'http'}://{at.host}:{at.port}" for at in upstreams]
        return Launch(
            command=(
                *(str(place.executable(self.name)), *self.arguments),
                *("--host", HOST, "--port", str(port)),
                *("--prometheus-host", HOST, "--prometheus-port", str(metrics_port)),
                *("--policy", _POLICY, "--log-level", self.warnings_only),
                *("--worker-urls", *workers),
            ),
            ready_path="/readiness",
            ready_s=_READY_S,
        )


VLLM_ROUTER = WheelRouter("vllm-router", "0.1.17", (), "warning")
SGLANG_ROUTER = WheelRouter("sglang-router", "0.3.2", ("launch",), "warn")
SMG = WheelRouter("smg", "1.13.0", ("launch",), "warn")
