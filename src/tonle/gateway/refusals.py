"""The refusals only a gateway makes, as leaves of the tree in `tonle.errors`.

CallerError    ├── Unauthorized      no key, or an unknown one            401
               ├── Forbidden         the key may not do this              403
               ├── ForeignPage       a web page of another site asks      403
               ├── NoHandler         unknown path, or wrong method        404, 405
               ├── UnknownRequest    not remembered, or not the caller's  404
               ├── Conflict          it is there already, or in the way   409
               ├── NoLength          a body whose length is not told      411
               ├── NotJson           a body that is not JSON              415
               ├── NotForm           a body that is not a form            415
               └── NotServedHere     another server of the same has it    501
CapacityError  ├── TooMany                                                429
               │   ├── RateLimited   over a limit of the key              429
               │   └── QueueFull     the queue is full                    429
               ├── NoBackend         no healthy backend for it           503
               └── DeadlinePassed    too late to begin                    504
InternalError  ├── LoopDetected      it has passed this gateway before    508
               └── UpstreamFailed    a backend failed                     502
                   └── UpstreamTimeout   it did not answer in time        504
"""

from __future__ import annotations

from tonle.errors import CallerError, CapacityError, InternalError, NotFound
from tonle.protocol.errors import ErrorReply


class Unauthorized(CallerError):
    status = 401
    code = "invalid_api_key"


class Forbidden(CallerError):
    status = 403
    code = "forbidden"


class ForeignPage(CallerError):
    status = 403
    code = "foreign_page"


class NoHandler(CallerError):
    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.body.error.message)
        self.reply = reply


class UnknownRequest(NotFound):
    code = "request_not_found"


class Conflict(CallerError):
    status = 409
    code = "conflict"


class NoLength(CallerError):
    status = 411
    code = "length_required"


class NotJson(CallerError):
    status = 415
    code = "unsupported_media_type"


class NotForm(CallerError):
    status = 415
    code = "unsupported_media_type"


class NotServedHere(CallerError):
    status = 501
    code = "not_served_here"


class TooMany(CapacityError):
    """People read the message before the header: it says when to try again, too."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, param=param)
        self.message = f"{message}; try again in {self.retry_after} s"
        self.args = (self.message,)


class RateLimited(TooMany):
    code = "rate_limit_exceeded"
    limit = ""  # what the key may do and no more: "make 60 requests per minute"


class QueueFull(TooMany):
    code = "queue_full"


class NoBackend(CapacityError):
    code = "no_backend"


class DeadlinePassed(CapacityError):
    status = 504
    code = "deadline_exceeded"


class LoopDetected(InternalError):
    status = 508
    code = "loop_detected"


class UpstreamFailed(InternalError):
    status = 502
    code = "upstream_failed"


class UpstreamTimeout(UpstreamFailed):
    status = 504
    code = "upstream_timeout"
