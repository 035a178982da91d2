"""A real `forebay serve` process, and how its tests see it: over HTTP, by its logs, from /proc."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
SERVE = (str(Path(sys.executable).with_name("forebay")), "serve")
_NO_CERTIFICATES = False
"""Reading the system's certificates anew for every call would take 50 ms of a core that the server
needs."""
START_S = 120.0
"""Python, torch and the weights on a machine that is busy with other things."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(directory: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, without any setting of the gateway's, and a state of its own."""
    of_the_machine = ("FOREBAY_CACHE_DIR", "FOREBAY_NATIVE")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in of_the_machine or not name.startswith("FOREBAY_")
    }
    return kept | {"FOREBAY_STATE_DIR": str(directory / "state")} | dict(extra)


class GatewayProcess:
    """Started by the constructor; a context manager that kills what still runs.

    `config` is YAML whose word PORT becomes a free port; unless it says where Redis is, there is
    none, which is one process less to start. Standard output and error go to files, so that a full
    pipe cannot block the server.
    """

    def __init__(
        self,
        directory: Path,
        config: str,
        environ: Mapping[str, str],
        command: Sequence[str] = SERVE,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        file = directory / "forebay.yaml"
        if "redis:" not in config:
            config += "redis: {url: off}\n"
        file.write_text(config.replace("PORT", str(self.port)))
        self._stdout = directory / "stdout"
        self._stderr = directory / "stderr"
        with self._stdout.open("w") as out, self._stderr.open("w") as err:
            self.process = subprocess.Popen(
                [*command, "--config", str(file)],
                stdout=out,
                stderr=err,
                env=environment(directory, environ),
                cwd=ROOT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """Everything written so far, both streams."""
        return self._stdout.read_text() + self._stderr.read_text()

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._stderr.read_text()

    def until_ready(self) -> Self:
        """Wait for readiness; fails if the process ends first."""
        eventually(lambda: self._still_runs() and self.status_of("/health/ready") == 200, START_S)
        return self

    def status_of(self, path: str) -> int | None:
        """The status of a GET, None if nobody listens."""
        try:
            return httpx.get(self.url + path, timeout=10, verify=_NO_CERTIFICATES).status_code
        except httpx.TransportError:
            return None

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    def exit_code(self, timeout_s: float = 30.0) -> int:
        """Wait for the process to end."""
        return self.process.wait(timeout=timeout_s)

    def metrics(self) -> Metrics:
        """Scrape now."""
        answer = httpx.get(self.url + "/metrics", timeout=10, verify=_NO_CERTIFICATES)
        assert answer.status_code == 200
        return Metrics(answer.text)

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024

    def open_files(self) -> int:
        """How many file descriptors the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def until_idle(self, timeout_s: float = 2.0) -> None:
        """Wait until no request, sequence or page is held; fails after `timeout_s`."""
        eventually(
            lambda: self.metrics().held() == {}, timeout_s, lambda: str(self.metrics().held())
        )

    def _still_runs(self) -> bool:
        assert self.process.poll() is None, self.output
        return True


class Metrics:
    """One scrape."""

    _HELD = ("forebay_in_flight", "forebay_running", "forebay_waiting")

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def series(self) -> int:
        """How many samples there are."""
        return len(self._samples)

    def held(self) -> dict[str, float]:
        """What requests hold at the moment; empty when the gateway is idle."""
        held = {name: self.total(name) for name in self._HELD}
        held["pages held"] = self.total("forebay_pages", state="held")
        return {name: value for name, value in held.items() if value}


def eventually(
    condition: Callable[[], object],
    timeout_s: float,
    explain: Callable[[], str] = lambda: "",
    every_s: float = 0.02,
) -> None:
    """Ask again and again until the condition holds; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {explain()}"
        time.sleep(every_s)
