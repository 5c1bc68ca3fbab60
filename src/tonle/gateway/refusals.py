"""The refusals only a gateway makes, as leaves of the tree in `tonle.errors`.

CallerError    ├── Unauthorized      no key, or one we do not know        401
               └── Forbidden         the key may not do this              403
CapacityError  ├── RateLimited       over a limit of the key              429
               ├── QueueFull         too many wait already                429
               ├── NoBackend         nobody is well who could answer      503
               └── DeadlinePassed    too late to begin                    504
InternalError  └── UpstreamFailed    a backend failed                     502
"""

from __future__ import annotations

from tonle.errors import CallerError, CapacityError, InternalError


class Unauthorized(CallerError):
    status = 401
    code = "invalid_api_key"


class Forbidden(CallerError):
    status = 403
    code = "forbidden"


class RateLimited(CapacityError):
    status = 429
    code = "rate_limit_exceeded"


class QueueFull(CapacityError):
    status = 429
    code = "queue_full"


class NoBackend(CapacityError):
    code = "no_backend"


class DeadlinePassed(CapacityError):
    status = 504
    code = "deadline_exceeded"


class UpstreamFailed(InternalError):
    status = 502
    code = "upstream_failed"
