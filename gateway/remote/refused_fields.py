"""Fields of the servers' own which no client may send through the gateway: with them it would reach
past the gateway, at other tenants' KV, at a server's order of work or at what the gateway counts.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html,
https://docs.sglang.ai/basic_usage/openai_api_completions.html,
https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.wire.fields import Fields

_Harmless = tuple[object, ...]

_POINTS_AT_KV = "is between servers; leave it out."
_PLACES = "is for the gateway to decide; leave it out."
_NAMES_ELSE = (
    "names something at the model's server that this model does not include; leave it out."
)
_IS_CODE = "would run code at the model's server; leave it out."
_HIDES = "goes around what the gateway checks; use this API's own fields."
_TOO_MUCH = "is not passed on; leave it out."

_REFUSED: Mapping[str, tuple[str, _Harmless]] = {
    # one server's KV for another's requests
    "kv_transfer_params": (_POINTS_AT_KV, ()),
    "ec_transfer_params": (_POINTS_AT_KV, ()),
    "disaggregated_params": (_POINTS_AT_KV, ()),
    "session_params": (_POINTS_AT_KV, ()),
    "bootstrap_host": (_POINTS_AT_KV, ()),
    "bootstrap_port": (_POINTS_AT_KV, ()),
    "bootstrap_room": (_POINTS_AT_KV, ()),
    "disagg_prefill_dp_rank": (_POINTS_AT_KV, ()),
    # who is served first, and by which part of a server
    "priority": (_PLACES, (0,)),
    "id_slot": (_PLACES, (-1,)),
    "slot_id": (_PLACES, (-1,)),
    "data_parallel_rank": (_PLACES, ()),
    "routed_dp_rank": (_PLACES, ()),
    # other weights than those that the tenant may use
    "lora": (_NAMES_ELSE, ([],)),
    "lora_path": (_NAMES_ELSE, ("",)),
    "ngram_corpus_id": (_NAMES_ELSE, ()),
    "logits_processors": (_IS_CODE, ([],)),
    "custom_logit_processor": (_IS_CODE, ("",)),
    # a second prompt, and second names of `n` and `max_tokens`
    "prompt_embeds": (_HIDES, ()),
    "input_ids": (_HIDES, ()),
    "n_cmpl": (_HIDES, (1,)),
    "n_predict": (_HIDES, ()),
    # answers that are too large, or come so rarely that the server looks dead
    "return_hidden_states": (_TOO_MUCH, (False,)),
    "stream_interval": (_TOO_MUCH, (1,)),
    "sse_ping_interval": (_TOO_MUCH, ()),
    # labels of the server's metrics, of which there would be no end
    "custom_labels": (_TOO_MUCH, ({},)),
}
"""Each with why, and the values that ask for nothing."""

_EXTRAS = "vllm_xargs"
"""vLLM puts what is in there where it also puts `kv_transfer_params`: under the same names."""
_REPORT_MODE = "kv_cache_report_mode"
"""Of what is in there, it changes what vLLM tells of the request's KV, by which it is followed."""


def refuse_servers_own(fields: Fields) -> None:
    """Raises a 400 ApiError that names the first such field which asks for something."""
    _refuse(fields)
    extras = fields.value(_EXTRAS)
    if isinstance(extras, dict):
        _refuse(Fields(extras, fields.path(_EXTRAS)))


def without_servers_own(values: Mapping[str, object]) -> dict[str, object]:
    """A copy without such fields: what asks for nothing at one server may ask for something at
    another, as a priority of 0 does where requests without one come last."""
    if _REFUSED.keys().isdisjoint(values):
        kept = dict(values)
    else:
        kept = {name: value for name, value in values.items() if name not in _REFUSED}
    extras = kept.get(_EXTRAS)
    if isinstance(extras, dict) and _REPORT_MODE in extras:
        kept[_EXTRAS] = {name: value for name, value in extras.items() if name != _REPORT_MODE}
    return kept


def _refuse(fields: Fields) -> None:
    for name in fields.given(_REFUSED):
        why, harmless = _REFUSED[name]
        if fields.value(name) not in harmless:
            raise fields.wrong(name, why)
