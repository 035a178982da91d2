"""GET /v1/models: what a key may use."""

from __future__ import annotations

from gateway.http_call import HttpCall
from gateway.metrics import Metrics
from gateway.models import AnyModel, Models
from gateway.reload import RuntimeConfig
from gateway.request import Request
from gateway.settlement import settled

MODEL_PREFIX = "/v1/models/"


class ModelList:
    """Lists the models that the caller's tenant may use, and no others."""

    def __init__(self, runtime: RuntimeConfig, models: Models, metrics: Metrics) -> None:
        self._runtime = runtime
        self._models = models
        self._metrics = metrics

    async def show_all(self, call: HttpCall) -> None:
        """GET /v1/models."""
        request = Request(call, "models", self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate()
            shown = [_card(model) for name, model in self._models.items() if tenant.may_use(name)]
            await call.answer_json({"object": "list", "data": shown})

    async def show_one(self, call: HttpCall) -> None:
        """GET /v1/models/{id}; the id may contain slashes."""
        request = Request(call, "models", self._runtime.current)
        with settled(request, self._metrics):
            name = call.path.removeprefix(MODEL_PREFIX)
            model = request.model = self._models.find(name, request.authenticate())
            await call.answer_json(_card(model))


def _card(model: AnyModel) -> dict[str, object]:
    card: dict[str, object] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "forebay",
    }
    if model.max_context is not None:
        card["max_model_len"] = model.max_context
    return card
