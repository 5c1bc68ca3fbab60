"""Every error has one status, one body."""

from __future__ import annotations

import pytest

from tonle import errors
from tonle.protocol.errors import error_reply, no_such_path, wrong_method


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("m", param="p"), 400, "invalid_request_error", "invalid_value"),
        (errors.ContextOverflow("m", param="p"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.NotFound("m", param="p"), 404, "invalid_request_error", "not_found"),
        (errors.TooLarge("m", param="p"), 413, "invalid_request_error", "request_too_large"),
        (errors.CapacityError("m", param="p"), 503, "service_unavailable_error", "overloaded"),
        (errors.EngineRestarting("m", param="p"), 503, "service_unavailable_error", "engine_restarting"),
        (errors.ShuttingDown("m", param="p"), 503, "service_unavailable_error", "shutting_down"),
        (errors.InternalError("m", param="p"), 500, "server_error", "internal_error"),
        (errors.EngineDied("m", param="p"), 500, "server_error", "engine_died"),
        (errors.WorkerDied("m", param="p"), 500, "server_error", "worker_died"),
        (errors.WorkerTimedOut("m", param="p"), 504, "server_error", "worker_timeout"),
    ],
)
def test_ours(error: errors.TonleError, status: int, kind: str, code: str) -> None:
    reply = error_reply(error)
    detail = reply.body.error
    assert (reply.status, detail.type, detail.code) == (status, kind, code)
    assert (detail.message, detail.param) == ("m", "p")
    assert bool(reply.headers) == isinstance(error, errors.CapacityError)


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.1, "2"), (30, "30")])
def test_retry_after(seconds: float, header: str) -> None:
    assert error_reply(errors.CapacityError("m", retry_after_s=seconds)).headers == [("retry-after", header)]


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("secret"), OSError("secret"), MemoryError("secret")])
def test_others_say_nothing_of_themselves(error: Exception) -> None:
    reply = error_reply(error)
    assert reply.status == 500 and "secret" not in reply.body.error.message


def test_routes() -> None:
    reply = no_such_path("/x", "Look elsewhere.")
    assert reply.status == 404 and reply.body.error.message == "There is nothing at /x. Look elsewhere."
    reply = wrong_method("GET", "/x", ["POST", "PUT"])
    assert reply.status == 405 and reply.headers == [("allow", "POST, PUT")]
