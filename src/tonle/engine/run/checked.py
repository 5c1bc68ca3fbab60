"""The tokens of a CUDA step with guesses, once they are read: which guesses were right, and what came after them.

Does: compare. Does not: draw. The device has drawn at every place of a guess, each with its own number, as if all guesses before
it were right; what it drew behind one that was wrong is left out.
"""

from __future__ import annotations

from tonle.engine.plan import StepResult, num_equal
from tonle.engine.request import TokenLogprob
from tonle.engine.run.runner import LaunchedStep
from tonle.engine.sample.token_logprobs import token_logprobs


def checked(launched: LaunchedStep) -> StepResult:
    """`launched.order` names an entry as often as it was drawn for: once, and once for each guess, in the order of places."""
    plan, values = launched.plan, launched.tokens.tolist()
    firsts: dict[int, int] = {}  # plan index -> its first sample
    for place, i in enumerate(launched.order):
        firsts.setdefault(i, place)
    result = StepResult(tokens=[values[firsts[i]] for i in sorted(firsts)])
    for i, count in plan.drafts.items():
        first = firsts[i]
        num_right = num_equal(values[first : first + count], plan.draft(i))
        result.more[i] = values[first + 1 : first + 1 + num_right]
    records = _logprobs(launched, values)
    for i, first in firsts.items():
        if first in records:
            result.logprobs[i] = records[first]
            if i in result.more:
                result.more_logprobs[i] = [records[first + 1 + n] for n in range(len(result.more[i]))]
    return result


def _logprobs(launched: LaunchedStep, values: list[int]) -> dict[int, TokenLogprob]:
    """By place among the samples."""
    if launched.raw is None:
        return {}
    found = token_logprobs(launched.raw, [values[place] for place in launched.wanted], max(launched.wanted.values()))
    for (_, num_top), record in zip(launched.wanted.items(), found, strict=True):
        record.top = record.top[:num_top]
    return dict(zip(launched.wanted, found, strict=True))
