"""`sentences_of`: where one request's time went, in plain sentences, the largest part first.

Does: choose what is worth a sentence, and write it. Does not: know who may read it (`explain.py` names other requests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tonle.observe.seen_request import SeenRequest
from tonle.observe.spans import (
    ACCEPT,
    DECODE,
    DELIVER,
    ENGINE_QUEUE,
    GATEWAY_QUEUE,
    PREFILL,
    SEND,
    WORKER,
    Span,
    engine_times,
    is_for_workers,
    matters,
    stands_out,
    waited_s,
)
from tonle.observe.time_words import a_prompt, count, listed, ms
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent, WaitReason

Who = Callable[[OtherPrompt], str]  # whose prompt it is: key b (req-1), another key, another request
Weighed = tuple[float, str]  # seconds that a sentence is about, and the sentence

_WAITED: dict[WaitReason, str] = {
    "step": "waited for the end of the step that was under way when it came",
    "prompts": "waited while the tokens of steps went to requests ahead of it",
    "rows": "waited because as many sequences were running as may run at once (max_num_seqs)",
    "tuned": "waited because as many sequences were running as adaptive tuning allows",
    "blocks": "waited because too few KV blocks were free",
    "adapter": "waited for its LoRA adapter: it was being read, or no slot was free for it",
    "grammar": "waited while the grammar of its answer was compiled",
    "batch": "waited for its batch to begin (static batching)",
    "loading": "waited while keys and values of its prompt were brought from elsewhere",
}
_BEHIND: tuple[WaitReason, ...] = ("step", "prompts")  # reasons that the prompts of others explain
_STAGES = {
    ACCEPT: "before it was accepted",
    GATEWAY_QUEUE: "while it waited in the gateway",
    SEND: "before any of the answer came",
    ENGINE_QUEUE: "while it waited in the engine's queue",
    PREFILL: "while its prompt was computed",
    DECODE: "while its answer was written",
    WORKER: "while it waited for a worker, or one worked on it",
    DELIVER: "while its answer was delivered",
}


def sentences_of(seen: SeenRequest, spent: TimeSpent | None, spans: list[Span], who: Who) -> list[str]:
    """How it ended, if not well; then its parts. Never empty."""
    took = {span.name: span.seconds for span in spans}
    parts = [*_gateway(seen, took), *_engine(seen, spent, took, who), *_ways(seen, spent, took)]
    parts.sort(key=lambda part: -part[0])
    found = [*_ending(seen, spans), *(sentence for _, sentence in parts)]
    return found or [f"It took {ms(seen.total_s)} in all; no part of it stands out."]


# -- how it ended


def _ending(seen: SeenRequest, spans: list[Span]) -> Iterator[str]:
    last = next((span.name for span in reversed(spans) if stands_out(span.seconds, seen.total_s)), None)
    stage = _STAGES[last or (spans[-1].name if spans else ACCEPT)]
    code = f" ({seen.error})" if seen.error else ""
    if seen.status == "cached":
        yield f"Answered from the response cache after {ms(seen.total_s)}: no backend was asked."
    elif seen.status == "refused":
        yield f"Refused with status {seen.http_status} after {ms(seen.total_s)}{_refused_why(seen)}{code}."
    elif seen.status == "cancelled":
        written = f", after {count(seen.completion_tokens, 'token')}" if seen.completion_tokens else ""
        yield f"The caller left after {ms(seen.total_s)}, {stage}{written}."
    elif seen.status == "interrupted":
        yield f"Cut off after {ms(seen.total_s)}, {stage}: the server was stopped."
    elif seen.status == "failed":
        status = f" with status {seen.http_status}" if seen.http_status >= 400 else ""
        at = f" at {seen.backend}" if seen.backend and not seen.is_local else ""
        yield f"Failed{at}{status} after {ms(seen.total_s)}, {stage}{code}."


def _refused_why(seen: SeenRequest) -> str:
    if seen.limit:
        return f": its key may {seen.limit}"
    words = {
        "rate_limit_exceeded": ": its key was over one of its limits",
        "queue_full": ": the queue was full",
        "no_backend": ": no healthy backend had its model",
        "invalid_api_key": ": its API key is missing, unknown or revoked",
        "forbidden": ": its key may not do this",
        "model_not_found": ": there is no such model for its key",
        "context_length_exceeded": ": its prompt and the tokens asked for do not fit the model's context",
        "engine_restarting": ": the engine was not ready",
        "shutting_down": ": the server was being stopped",
        "overloaded": ": the server had no room for it",
    }
    return words.get(seen.error or "", "")


# -- its parts


def _gateway(seen: SeenRequest, took: dict[str, float]) -> Iterator[Weighed]:
    total_s = seen.total_s
    waiting_s = took.get(GATEWAY_QUEUE, 0.0)
    queued_s = min(waited_s(seen), waiting_s)
    if seen.status == "cached":
        if stands_out(waiting_s, total_s):
            yield waiting_s, (f"{ms(waiting_s)} of {ms(total_s)}: waited for the cache, or for an identical request that "
                              "was being computed.")  # fmt: skip
        return
    if matters(queued_s, total_s):
        at = f" at {seen.backend}" if seen.backend and not seen.is_local else ""
        yield queued_s, f"{ms(queued_s)} of {ms(total_s)}: waited in the gateway for a turn{at}."
    lost_s = waiting_s - queued_s
    if seen.failed:
        names = listed(list(dict.fromkeys(seen.failed)))
        went_on = f"; {seen.backend} was asked next" if seen.backend and seen.backend not in seen.failed else ""
        cost = f", which took {ms(lost_s)}" if matters(lost_s, total_s) else ""
        yield max(lost_s, 0.0), f"{names} failed on this request{cost}{went_on}."
    elif stands_out(lost_s, total_s):
        yield lost_s, f"{ms(lost_s)} of {ms(total_s)}: prepared in the gateway (cache, audit trail, a prefill backend)."
    if seen.fallback and seen.backend:
        yield (
            0.0,
            f"No backend of {seen.model} could answer, so {seen.fallback} answered in its place, at {seen.backend}.",
        )
    if seen.why == "region" and seen.backend:
        yield 0.0, f"No backend of a nearer region had room, so it was sent to {seen.region or 'another region'}."
    if seen.why == "hedge" and seen.backend:
        yield 0.0, f"Another backend had not begun in time, so {seen.backend} was asked too, and answered first."
    accept_s = took.get(ACCEPT, 0.0)
    if seen.accepted_s is not None and stands_out(accept_s, total_s):
        yield accept_s, f"{ms(accept_s)} of {ms(total_s)}: read, checked against its key's limits, and accepted."


def _engine(seen: SeenRequest, spent: TimeSpent | None, took: dict[str, float], who: Who) -> Iterator[Weighed]:
    if spent is not None:
        yield from _waits(spent, seen.total_s, who)
        yield from _prefill(spent, seen.total_s)
        yield from _decode(seen, spent, who)
        return
    if engine_times(seen, None) is None:
        yield from _from_outside(seen, took)
        return
    total_s = seen.total_s
    if matters(queue_s := took.get(ENGINE_QUEUE, 0.0), total_s):
        yield queue_s, f"{ms(queue_s)} of {ms(total_s)}: waited in the engine's queue."
    if matters(prefill_s := took.get(PREFILL, 0.0), total_s):
        yield prefill_s, f"{_prompt(seen)} took {ms(prefill_s)} to compute."
    if matters(decode_s := took.get(DECODE, 0.0), total_s):
        yield decode_s, f"Decoding took {ms(decode_s)} for {count(seen.completion_tokens, 'token')}."


def _waits(spent: TimeSpent, total_s: float, who: Who) -> Iterator[Weighed]:
    """Waiting for a step under way and for the prompts of others is one thing to the reader: it names those prompts."""
    behind_s = sum(wait.seconds for wait in spent.waits if wait.why in _BEHIND) if spent.behind else 0.0
    if matters(behind_s, total_s):
        others = listed([_of(other, who) for other in spent.behind])
        yield behind_s, f"{ms(behind_s)} of {ms(total_s)}: waited behind {others}."
    for wait in spent.waits:
        if matters(wait.seconds, total_s) and not (behind_s and wait.why in _BEHIND):
            yield wait.seconds, f"{ms(wait.seconds)} of {ms(total_s)}: {_WAITED[wait.why]}."


def _prefill(spent: TimeSpent, total_s: float) -> Iterator[Weighed]:
    prompt = spent.cached_tokens + sum(spent.missed.values())
    if matters(spent.prefill_s, total_s):
        yield spent.prefill_s, f"{_found(spent, prompt)} (prefill: {ms(spent.prefill_s)}){_why_missed(spent)}."
    if matters(spent.prefill_waited_s, total_s):
        yield spent.prefill_waited_s, (f"{ms(spent.prefill_waited_s)} of its prefill passed in steps that computed other "
                                       "requests only.")  # fmt: skip


def _found(spent: TimeSpent, prompt: int) -> str:
    computed = f"{spent.computed_tokens:,} {'was' if spent.computed_tokens == 1 else 'were'} computed"
    steps = f" in {count(spent.num_chunks, 'step')}" if spent.num_chunks else ""
    if not spent.cached_tokens:
        return f"{count(spent.computed_tokens, 'prompt token')} had to be computed{steps}"
    if not prompt:
        prompt = spent.cached_tokens + spent.computed_tokens
    return (
        f"{spent.cached_tokens:,} of {count(prompt, 'prompt token')} were found in the prefix cache; {computed}{steps}"
    )


def _why_missed(spent: TimeSpent) -> str:
    """The reason for most of what was not found."""
    missed = {why: tokens for why, tokens in spent.missed.items() if tokens > 0}
    if not missed:
        return ""
    why = max(missed, key=lambda each: missed[each])
    others = len(missed) > 1 and missed[why] < sum(missed.values())
    which = f"{missed[why]:,} of them" if others else "they"
    if why == "off":
        return ": the prefix cache is switched off"
    if why == "evicted":
        return f": {which} had been in the cache, and were dropped to make room"
    if why == "tail":
        return ": the end of a prompt is always computed"
    return ": the rest was new" if spent.cached_tokens else ": this beginning was new"


def _decode(seen: SeenRequest, spent: TimeSpent, who: Who) -> Iterator[Weighed]:
    total_s = seen.total_s
    if matters(spent.decode_s, total_s):
        steps = f" in {count(spent.num_steps, 'step')}" if spent.num_steps else ""
        if spent.draft_tokens:
            steps += f" ({spent.accepted_tokens:,} of {spent.draft_tokens:,} guesses were right)"
        sentence = f"Decoding took {ms(spent.decode_s)} for {count(seen.completion_tokens, 'token')}{steps}"
        if matters(spent.stalled_s, total_s):
            shared = f"{spent.num_stalled:,} of its steps" if spent.num_stalled else "its steps"
            sentence += f"; {ms(spent.stalled_s)} of it because prompts of others shared {shared}"
            if spent.stalled_by:
                sentence += f" ({listed([_of(other, who) for other in spent.stalled_by])})"
        yield spent.decode_s, f"{sentence}."
    if spent.num_preemptions:
        times = {1: "once", 2: "twice"}.get(spent.num_preemptions, f"{spent.num_preemptions:,} times")
        yield spent.preempted_s, f"Set back {times}, for {ms(spent.preempted_s)}, because KV blocks ran out."


def _of(other: OtherPrompt, who: Who) -> str:
    return f"{a_prompt(other.prompt_tokens)} of {who(other)}"


def _from_outside(seen: SeenRequest, took: dict[str, float]) -> Iterator[Weighed]:
    """A backend that tells nothing of its time."""
    if seen.sent_s is None or seen.status not in ("ok", "cancelled", "interrupted", "failed"):
        return
    if is_for_workers(seen):
        yield from _worker(seen, took)
        return
    name = "the engine" if seen.is_local else seen.backend or "the backend"
    prefill_s, decode_s = took.get(PREFILL, 0.0), took.get(DECODE, 0.0)
    if seen.stream and matters(prefill_s, seen.total_s):
        yield prefill_s, (f"{ms(prefill_s)} of {ms(seen.total_s)}: until the first token of {name}; its queue, the prompt and "
                          "the way to it are not told apart.")  # fmt: skip
    elif matters(prefill_s, seen.total_s):
        yield prefill_s, f"{_prompt(seen)} took {name} {ms(prefill_s)}."
    if not matters(decode_s, seen.total_s):
        return
    tokens = count(seen.completion_tokens, "token")
    if seen.stream:
        yield decode_s, f"The tokens after the first took {ms(decode_s)} ({tokens} in all)."
    else:
        yield (
            decode_s,
            f"{'The engine' if seen.is_local else name} took {ms(decode_s)} for its whole answer of {tokens}.",
        )


def _worker(seen: SeenRequest, took: dict[str, float]) -> Iterator[Weighed]:
    """A pool's queue and its worker are not told apart."""
    worker_s = took.get(WORKER, 0.0)
    if not matters(worker_s, seen.total_s):
        return
    pool = f"the worker pool {seen.pool}" if seen.pool else "a worker pool"
    if seen.is_local:
        name = pool
    elif seen.pool:
        name = f"{pool} of {seen.backend or 'the backend'}"
    else:
        name = seen.backend or "the backend"
    until = "until its answer began" if seen.first_byte_s is not None else "without an answer"
    yield worker_s, f"{ms(worker_s)} of {ms(seen.total_s)}: {name}, its queue and its work, {until}."


def _ways(seen: SeenRequest, spent: TimeSpent | None, took: dict[str, float]) -> Iterator[Weighed]:
    """To the engine and back."""
    total_s = seen.total_s
    send_s, deliver_s = took.get(SEND, 0.0), took.get(DELIVER, 0.0)
    if stands_out(send_s, total_s) and engine_times(seen, spent) is not None:
        way = (
            "its prompt was read and made into tokens"
            if seen.is_local
            else f"on the way to {seen.backend}, which read it"
        )
        yield send_s, f"{ms(send_s)} of {ms(total_s)}: {way}."
    if not stands_out(deliver_s, total_s) or seen.status == "cached":
        return
    if is_for_workers(seen):
        yield deliver_s, (f"{ms(deliver_s)} of {ms(total_s)}: from the beginning of the answer to its end (the rest was made, "
                          "the network, a caller that reads slowly).")  # fmt: skip
    else:
        yield deliver_s, (f"{ms(deliver_s)} of {ms(total_s)}: between the last token and the end of the reply (making text, the "
                          "network, a caller that reads slowly).")  # fmt: skip


def _prompt(seen: SeenRequest) -> str:
    if not seen.prompt_tokens:
        return "The prompt"
    cached = f", {seen.cached_tokens:,} of them found in the prefix cache," if seen.cached_tokens else ""
    return f"The prompt of {count(seen.prompt_tokens, 'token')}{cached}"
