"""Every model that is served, by name and alias, and what stands in for one that cannot serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from gateway.errors import bad_request, model_not_found
from gateway.settings import ModelSettings
from gateway.tenants import Tenant

if TYPE_CHECKING:  # the server listens before it loads what models need
    from gateway.remote.model import RemoteModel
    from gateway.served_model import ServedModel

AnyModel: TypeAlias = "ServedModel | RemoteModel"


class Models(Mapping[str, AnyModel]):
    """A mapping of the models' own names; aliases are other ways to ask for them.

    Filled by the fleet, read by everybody else. Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._models: dict[str, AnyModel] = {}
        self._aliases: dict[str, str] = {}
        self._fallbacks: dict[str, tuple[str, ...]] = {}

    def __getitem__(self, name: str) -> AnyModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def add(self, model: AnyModel) -> None:
        """Serve it under its own name."""
        self._models[model.name] = model

    def clear(self) -> None:
        """Serve nothing any more."""
        self._models.clear()

    def configure(self, settings: Sequence[ModelSettings]) -> None:
        """Use these aliases and fallbacks from the next request on."""
        self._aliases = {alias: model.name for model in settings for alias in model.aliases}
        self._fallbacks = {model.name: model.fallbacks for model in settings}

    def own_name(self, name: str) -> str:
        """A model's own name, where it was asked for by an alias."""
        return self._aliases.get(name, name)

    def find(self, name: str, tenant: Tenant) -> AnyModel:
        """The model of this name or alias, if the tenant may use it; otherwise the same 404 in
        either case. What counts is whether the tenant may use the model's own name."""
        name = self._aliases.get(name, name)
        model = self._models.get(name)
        if model is None or not tenant.may_use(name):
            raise model_not_found()
        return model

    def find_served(self, name: str, tenant: Tenant) -> ServedModel:
        """As `find`, for what only engines of our own can do: a 400 for a remote model."""
        model = self.find(name, tenant)
        if model.runs_elsewhere:
            raise bad_request(
                "This model runs on remote servers, which do not offer this.", param="model"
            )
        return model

    def served(self) -> dict[str, ServedModel]:
        """Those that engines of our own run."""
        return {name: model for name, model in self._models.items() if not model.runs_elsewhere}

    def remote_names(self) -> list[str]:
        """Names of those that run elsewhere."""
        return [name for name, model in self._models.items() if model.runs_elsewhere]

    def choose_remote(self, name: object, tenant: Tenant) -> RemoteModel | None:
        """The remote model that a request for `name`, which may be anything, goes to."""
        if not isinstance(name, str):
            return None
        model = self._models.get(self._aliases.get(name, name))
        if model is None or not tenant.may_use(model.name):
            return None
        chosen = self._or_fallback(model, tenant)
        return chosen if chosen.runs_elsewhere else None

    def choose_served(self, name: str, tenant: Tenant) -> ServedModel:
        """The model of our own engines that a request for `name` goes to. Raises as `find`."""
        chosen = self._or_fallback(self.find(name, tenant), tenant)
        return self.find_served(name, tenant) if chosen.runs_elsewhere else chosen

    def _or_fallback(self, model: AnyModel, tenant: Tenant) -> AnyModel:
        """The model that was asked for, or if none of its replicas has room the first of its
        fallbacks that has, among those that the tenant may use."""
        fallbacks = self._fallbacks.get(model.name)
        if not fallbacks or model.router.has_room:
            return model
        for fallback in fallbacks:
            other = self._models.get(fallback)
            if other is not None and tenant.may_use(fallback) and other.router.has_room:
                return other
        return model
