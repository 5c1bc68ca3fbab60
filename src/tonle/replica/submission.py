"""`Submission`: the work that one HTTP request causes in the engine: a generation for each of its prompts.

Does: submit, cancel, add up usage and times. Does not: read requests or write answers (`generate.py`).
"""

from __future__ import annotations

from typing import Any

from tonle.engine.front import Front
from tonle.engine.generation import Generation
from tonle.engine.request import Usage
from tonle.errors import InvalidRequest
from tonle.protocol.adapters import ADAPTER_HEADER, header_value
from tonle.protocol.openai import CompletionTokensDetails, PromptTokensDetails, WireUsage
from tonle.replica.read_transfer import NO_TRANSFER, Transfer, transfer_params
from tonle.replica.translate import EngineRequest
from tonle.telemetry.time_spent import TimeSpent


class Submission:
    """The work one HTTP request causes in the engine. Choice = place of the prompt x n + index."""

    def __init__(
        self, front: Front, order: EngineRequest, *, request_id: str, salt: bytes = b"", adapter: str | None = None,
        transfer: Transfer = NO_TRANSFER,
    ) -> None:  # fmt: skip
        self.order = order
        self.num_choices = len(order.parts) * order.n
        self.generations: list[Generation] = []
        self.reasoning_tokens: int | None = None  # of all choices; None: thoughts are not told apart
        self._front = front
        self._request_id = request_id
        self._salt = salt
        self._adapter = adapter
        self._transfer = transfer

    def submit(self) -> None:
        """Raises `CallerError` or `CapacityError`; then nothing is left in the engine."""
        try:
            for part in self.order.parts:
                generation = self._front.submit(
                    part.prompt, part.config, priority=self.order.priority, salt=self._salt, request_id=self._request_id,
                    adapter=self._adapter, remote=self._transfer.remote, keep_blocks=self._transfer.keep,
                )  # fmt: skip
                self.generations.append(generation)
        except BaseException as failure:
            self.cancel()
            raise self.in_callers_words(failure) from None

    def in_callers_words(self, failure: BaseException) -> BaseException:
        """A refusal of what the answer must be, under the name of the field that said it."""
        name = self.order.structured_by
        if name is None or not isinstance(failure, InvalidRequest) or failure.param not in (None, "structured"):
            return failure
        return InvalidRequest(f"{name}: {failure.message}", param=name)

    def cancel(self) -> None:
        for generation in self.generations:
            generation.cancel()

    @property
    def headers(self) -> dict[str, str]:
        """Of its answer, once it is submitted: only then is it certain what computes it."""
        adapter = self.generations[0].adapter
        return {} if adapter is None else {ADAPTER_HEADER: header_value(adapter.name, adapter.digest)}

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """Where its prompt is kept for another server; None if that was not asked for."""
        return transfer_params(self.generations[0].kept) if self._transfer.tells else None

    def generation(self, choice: int) -> Generation:
        return self.generations[choice // self.order.n]

    @property
    def usage(self) -> Usage:
        """All prompts together; a prompt counts once, whatever n."""
        usages = [generation.usage for generation in self.generations]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            completion_tokens=0 if self.order.prompt_only else sum(usage.completion_tokens for usage in usages),
        )

    @property
    def wire_usage(self) -> WireUsage:
        usage = self.usage
        total = usage.prompt_tokens + usage.completion_tokens
        wire = WireUsage(usage.prompt_tokens, usage.completion_tokens, total, PromptTokensDetails(usage.cached_tokens))
        if self.reasoning_tokens is not None:
            wire.completion_tokens_details = CompletionTokensDetails(self.reasoning_tokens)
        return wire

    @property
    def engine_s(self) -> dict[str, float]:
        """Where the engine's time went, as far as it came, seconds; of several prompts, the slowest's."""
        found = [generation.timings for generation in self.generations]
        parts = {
            "queue": [timings.queue_s for timings in found],
            "prefill": [_gap(timings.scheduled_s, timings.first_token_s) for timings in found],
            "decode": [_gap(timings.first_token_s, timings.finished_s) for timings in found],
        }
        known = {name: [value for value in values if value is not None] for name, values in parts.items()}
        return {name: max(values) for name, values in known.items() if values}

    @property
    def guesses(self) -> dict[str, int]:
        """Of speculative decoding, over all answers; empty: there were none."""
        drafted = sum(generation.draft_tokens for generation in self.generations)
        accepted = sum(generation.accepted_tokens for generation in self.generations)
        return {"draft_tokens": drafted, "accepted_tokens": accepted} if drafted else {}

    @property
    def spent(self) -> TimeSpent | None:
        """Of the slowest that has ended in the engine."""
        found = [generation.spent for generation in self.generations if generation.spent is not None]
        return max(found, key=lambda spent: spent.total_s, default=None)


def _gap(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
