"""`GenerationStats`: what one call of `optimized_generate` did. A dict that prints as a table.

Does: pick the best candidate, add up tokens and times, read the peak of memory. Does not: measure inside the engine.
"""

from __future__ import annotations

import resource
import sys
from typing import Any, TypedDict

import torch

from tonle.engine.request import GenerationResult

_SHOWN_PROMPTS = 4  # whose scores are printed


class Candidate(TypedDict):
    """One continuation of a prompt."""

    new_ids: list[int]  # without the prompt
    text: str  # of new_ids; empty if the optimizer has no tokenizer
    score: float  # mean log-probability of new_ids by the model itself, before temperature and penalties
    finish_reason: str  # stop | length


class GenerationStats(dict[str, Any]):
    """Keys: see `docs/library.md`. `print` it for a table, `dict(stats)` for the values."""

    def __str__(self) -> str:
        return "\n".join(f"{name:<18} {_shown(name, value)}" for name, value in self.items())


def ranked(result: GenerationResult) -> list[Candidate]:
    """The continuations of one prompt, best first; equal ones in the order of their making."""
    logprobs = result.logprobs or []
    candidates = [
        Candidate(
            new_ids=new_ids,
            text=result.texts[place],
            score=sum(token.logprob for token in logprobs[place]) / max(1, len(new_ids)),
            finish_reason=result.finish_reasons[place],
        )
        for place, new_ids in enumerate(result.output_ids)
    ]
    return sorted(candidates, key=lambda candidate: -candidate["score"])


def collect(
    results: list[GenerationResult],
    candidates: list[list[Candidate]],
    *,
    seconds: float,
    mode: str,
    device: str,
    guesses: dict[str, int],
) -> GenerationStats:
    """`seconds`: from the first submission to the last token of the batch. `guesses`: of speculative decoding, as the engine
    counts them."""
    first = [result.timings.ttft_s or 0.0 for result in results]
    new_tokens = sum(len(of_prompt[0]["new_ids"]) for of_prompt in candidates)
    return GenerationStats(
        mode=mode,
        prompt_tokens=sum(len(result.prompt_ids) for result in results),
        new_tokens=new_tokens,
        generated_tokens=sum(len(candidate["new_ids"]) for of_prompt in candidates for candidate in of_prompt),
        seconds=seconds,
        tokens_per_second=new_tokens / seconds,
        first_token_s=sum(first) / len(first),
        first_token_max_s=max(first),
        acceptance_rate=guesses["accepted_tokens"] / guesses["draft_tokens"] if guesses["draft_tokens"] else None,
        peak_memory=peak_memory(device),
        candidates=candidates,
    )


def peak_memory(device: str) -> int:
    """Bytes, the most this process has held so far: of tensors on the GPU, or of all memory on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _shown(name: str, value: Any) -> str:
    if name == "peak_memory":
        return f"{value / 2**20:,.0f} MiB"
    if name == "acceptance_rate":
        return "None (no guesses were made)" if value is None else f"{value:.3f}"
    if name == "candidates":
        scores = ["/".join(f"{candidate['score']:.3f}" for candidate in of_prompt) for of_prompt in value]
        return f"scores {'; '.join(scores[:_SHOWN_PROMPTS])}{'; …' if len(scores) > _SHOWN_PROMPTS else ''}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
