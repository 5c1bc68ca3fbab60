"""`error_reply`: the only place where an exception becomes HTTP: status, OpenAI's error body, headers.

Does: map, without exposing internals of the server. Does not: log or send.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

from tonle.errors import CallerError, CapacityError, TonleError
from tonle.protocol.openai import ErrorBody, ErrorDetail


class ErrorReply(NamedTuple):
    status: int
    body: ErrorBody
    headers: list[tuple[str, str]]


def error_reply(error: BaseException) -> ErrorReply:
    """What the caller is told about `error`; of an unexpected error, only that it happened."""
    if not isinstance(error, TonleError):
        message = "The server failed on this request. Its log has the details; look for the X-Request-Id of this reply."
        return ErrorReply(500, _body(message, "server_error", code="internal_error"), [])
    headers = []
    if isinstance(error, CapacityError):
        headers.append(("retry-after", str(error.retry_after)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append(("www-authenticate", "Bearer"))
    body = _body(error.message, _error_type(error), param=error.param, code=error.code)
    return ErrorReply(error.status, body, headers)


def no_such_path(path: str, hint: str) -> ErrorReply:
    """`hint` says where this server lists what there is."""
    message = f"There is nothing at {path}. {hint}"
    return ErrorReply(404, _body(message, "invalid_request_error", code="not_found"), [])


def not_supported_yet(feature: str, hint: str) -> ErrorReply:
    """For a path that clients of this API know and we do not have."""
    message = f"Not supported yet: {feature}. {hint}"
    return ErrorReply(404, _body(message, "invalid_request_error", code="not_supported"), [])


def not_switched_on(path: str, advice: str) -> ErrorReply:
    """For a path that a worker pool would answer. `advice` says how to start one."""
    message = f"No worker pool answers {path} here. {advice}"
    return ErrorReply(501, _body(message, "invalid_request_error", code="not_switched_on"), [])


def wrong_method(method: str, path: str, allowed: list[str]) -> ErrorReply:
    message = f"{path} does not take {method}; use {' or '.join(allowed)}."
    body = _body(message, "invalid_request_error", code="method_not_allowed")
    return ErrorReply(405, body, [("allow", ", ".join(allowed))])


def _error_type(error: TonleError) -> str:
    if isinstance(error, CallerError):
        return "invalid_request_error"
    if error.status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if isinstance(error, CapacityError):
        return "service_unavailable_error"
    return "server_error"


def _body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    return ErrorBody(ErrorDetail(message, kind, param, code))
