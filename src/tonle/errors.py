"""Every error Tonle raises on purpose, as one tree with three branches.

    TonleError
    ├── CallerError      the request, the file or the setting is wrong: fix it and try again   (4xx)
    │   ├── InvalidRequest        a field has a wrong type or value                            400
    │   ├── ContextOverflow       prompt + max_tokens do not fit the context                   400
    │   ├── NotFound              unknown path or id                                           404
    │   │   └── UnknownModel      a model this server does not have                            404
    │   ├── TooLarge              the body is larger than the server takes                     413
    │   ├── ConfigError           a setting of the server or engine is wrong                   400
    │   └── ModelError            a model cannot be found, read or is not supported            400
    ├── CapacityError    right request, wrong moment: try again after `retry_after_s`          (503)
    │   ├── EngineRestarting      the engine died and is being started again                   503
    │   ├── ShuttingDown          the server was told to stop                                  503
    │   ├── AdapterUnavailable    the files of a LoRA adapter cannot be read again             503
    │   └── StoreLost             a store that several servers share is out of reach           503
    └── InternalError    our fault                                                             (500)
        ├── EngineDied            the engine's process ended while it worked on the request    500
        ├── WorkerDied            so did the process of a worker                               500
        └── WorkerTimedOut        a worker did not answer in time and was ended                504

`protocol/errors.py` is the only place that turns these into HTTP.
"""

from __future__ import annotations

import math


class TonleError(Exception):
    """The root. `message` is written for the person who reads it; `param` names the offending field, if one does."""

    status = 500
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class CallerError(TonleError):
    status = 400


class InvalidRequest(CallerError):
    code = "invalid_value"


class ContextOverflow(CallerError):
    code = "context_length_exceeded"


class NotFound(CallerError):
    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    code = "model_not_found"


class TooLarge(CallerError):
    status = 413
    code = "request_too_large"


class ConfigError(CallerError):
    code = "invalid_config"


class ModelError(CallerError):
    code = "model_error"


class CapacityError(TonleError):
    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s

    @property
    def retry_after(self) -> int:
        """Whole seconds, as the header has them and messages say them."""
        return max(1, math.ceil(self.retry_after_s))


class EngineRestarting(CapacityError):
    code = "engine_restarting"


class ShuttingDown(CapacityError):
    code = "shutting_down"


class AdapterUnavailable(CapacityError):
    code = "adapter_unavailable"


class StoreLost(CapacityError):
    code = "store_lost"


class InternalError(TonleError):
    code = "internal_error"


class EngineDied(InternalError):
    code = "engine_died"


class WorkerDied(InternalError):
    code = "worker_died"


class WorkerTimedOut(InternalError):
    status = 504
    code = "worker_timeout"
