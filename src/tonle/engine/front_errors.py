"""What a front tells its callers: why a request cannot be taken, and why one ended early.

Does: make the errors that answers and embeddings share. Does not: know which requests there are.
"""

from __future__ import annotations

from tonle.engine.adapters.front_adapters import FrontAdapters
from tonle.engine.messages import ADAPTER_UNREADABLE, AdapterInfo
from tonle.engine.request import RequestPriority
from tonle.errors import AdapterUnavailable, CapacityError, InternalError, InvalidRequest, TonleError, UnknownModel


def ended_early(reason: str, adapter: AdapterInfo | None) -> TonleError:
    """The engine ended a request, with this reason, before there was anything to deliver."""
    if reason == "cancelled":
        return CapacityError("the engine dropped this request: this server did not read its answers in time; try again")
    if reason == ADAPTER_UNREADABLE and adapter is not None:
        return AdapterUnavailable(
            f"adapter {adapter.name} is not available any more: its files cannot be read again; ask the operator to load "
            "it again", param="adapter", retry_after_s=30,
        )  # fmt: skip
    return InternalError(f"the engine could not compute this request ({reason})")


def refusal(why: str, adapter: AdapterInfo | None, adapters: FrontAdapters) -> TonleError:
    """The engine refused a request."""
    if adapter is not None and adapters.known.get(adapter.name) != adapter:  # unloaded while this was on its way
        return UnknownModel(why, param="adapter")
    return InvalidRequest(why)


def check_priority(priority: RequestPriority) -> None:
    """The loop computes with it: anything else would end the loop."""
    try:
        RequestPriority(priority)
    except ValueError:
        names = ", ".join(RequestPriority.__members__)
        raise InvalidRequest(
            f"priority must be a RequestPriority ({names}), not {priority!r}", param="priority"
        ) from None


def check_prompt(prompt: list[int], vocab_size: int, name: str = "prompt") -> None:
    """`name`: what the caller calls it."""
    if not prompt:
        raise InvalidRequest(f"the {name} is empty; give at least one token", param=name)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(f"token ids must lie in 0..{vocab_size - 1}", param=name)
