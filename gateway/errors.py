"""Errors as OpenAI's envelope: {"error": {"message", "type", "param", "code"}}, everywhere."""

from __future__ import annotations

from collections.abc import Mapping


class ApiError(Exception):
    """A refusal with its HTTP status, to be shown to the client as it is.

    `message` must not echo keys or the client's input. `param` names the offending field in
    OpenAI's notation (`messages[0].content`), `code` is machine-readable.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 - the wire's own word
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, object]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong and will stay wrong."""
    return ApiError(400, message, param=param, code=code)


def unauthorized(message: str) -> ApiError:
    """401: no key, or not one of ours. Never says which."""
    return ApiError(
        401,
        message,
        type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def model_not_found() -> ApiError:
    """404: no such model, or not one this key may use; the two look the same."""
    return ApiError(
        404,
        "The model does not exist or this key may not use it; GET /v1/models lists those it may.",
        param="model",
        code="model_not_found",
    )


def limit_exceeded(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """429: the tenant's own limit. `retry_after_s` is a time after which a retry can succeed."""
    return ApiError(
        429,
        message,
        type="rate_limit_error",
        code=code,
        headers={"retry-after": str(max(1, retry_after_s))},
    )


def unavailable(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """503: our capacity, not the tenant's doing."""
    return ApiError(
        503,
        message,
        type="server_error",
        code=code,
        headers={"retry-after": str(max(1, retry_after_s))},
    )


def internal_error(request_id: str) -> ApiError:
    """500: our fault; the request id finds it in the log."""
    return ApiError(
        500,
        f"Internal error; the server's log has it under request id {request_id}.",
        type="server_error",
        code="internal_error",
    )
