"""What the operator can do with the fleet while it runs."""

from __future__ import annotations

from typing import Protocol

from gateway.settings_fleet import RemoteSettings


class FleetControl(Protocol):
    """Adds replicas and takes them away. Raises ValueError, in words for the operator, for what
    cannot be done."""

    async def add_local(self, model: str) -> str:
        """One more engine of ours for this model; returns the replica's name."""
        ...

    async def add_remote(self, model: str, remote: RemoteSettings) -> str:
        """One more server for this model; returns the replica's name."""
        ...

    async def retire(self, replica: str, timeout_s: float) -> None:
        """Drain a replica and take it away."""
        ...


class LateFleetControl:
    """Stands for a fleet that is still being opened."""

    def __init__(self) -> None:
        self._fleet: FleetControl | None = None

    def use(self, fleet: FleetControl) -> None:
        """It is open."""
        self._fleet = fleet

    async def add_local(self, model: str) -> str:
        """See `FleetControl.add_local`."""
        return await self._open().add_local(model)

    async def add_remote(self, model: str, remote: RemoteSettings) -> str:
        """See `FleetControl.add_remote`."""
        return await self._open().add_remote(model, remote)

    async def retire(self, replica: str, timeout_s: float) -> None:
        """See `FleetControl.retire`."""
        await self._open().retire(replica, timeout_s)

    def _open(self) -> FleetControl:
        if self._fleet is None:
            raise ValueError("the models are still loading")
        return self._fleet
