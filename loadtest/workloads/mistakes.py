"""What is wrong with parameters or a plan, one line per mistake; values are not repeated."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError


def mistakes_of(error: ValidationError) -> list[str]:
    """Lines such as `tenants[0].slo.ttft_ms: must be more than 0`."""
    return [
        f"{where}: {message}" if (where := dotted(item["loc"])) else message
        for item in error.errors(include_url=False, include_input=False)
        if (message := _message(item["type"], item["msg"], item.get("ctx", {})))
    ]


def dotted(path: Iterable[str | int]) -> str:
    """("tenants", 0, "slo") as `tenants[0].slo`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _message(kind: str, message: str, context: dict[str, object]) -> str:
    match kind:
        case "extra_forbidden":
            return "unknown name"
        case "missing":
            return "is required"
        case "greater_than":
            return f"must be more than {context['gt']}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "less_than":
            return f"must be less than {context['lt']}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
        case "literal_error" | "enum":
            return f"must be one of {str(context['expected']).replace(' or ', ', ')}"
        case "value_error":
            return str(context["error"])
        case "model_type" | "dict_type":
            return "must be a mapping of names to values"
        case "string_too_short" | "too_short":
            return "must not be empty"
        case "list_type" | "tuple_type":
            return "must be a list"
        case _:
            return message[:1].lower() + message[1:]
