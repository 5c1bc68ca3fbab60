"""What every server of the comparison is asked to do: five levels of load, as data.

Does: say what a level sends, and turn it into options of `tonle.bench`. Does not: start servers or judge numbers.

Prompts are words drawn from a seed. All servers have the same tokenizer, so they get the same texts; `Level.check`
holds that against what each server counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonle.bench import BenchOptions, LevelReport, Span

OUTPUT_TOKENS = 64
MAX_WARMUP = 8
QUICK_WARMUP = 2
MIN_REQUESTS = 3  # of a quick level, which otherwise has one per user
PROMPT_SLACK_TOKENS = 4  # a word is now and then two tokens


@dataclass(frozen=True, slots=True)
class Level:
    """So many users, each of whom waits for the answer before asking again."""

    name: str
    title: str
    users: int
    requests: int
    own_tokens: int = 128  # of each prompt
    shared_tokens: int = 0  # the same for all prompts, before their own

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens

    def options(self, url: str, *, seed: int, quick: bool) -> BenchOptions:
        """Greedy, streamed, all answers equally long. Levels share no prompt: no prefix cache helps by chance."""
        return BenchOptions(
            url=url,
            endpoint="completions",
            prompt_kind="words",
            concurrency=(self.users,),
            requests=max(MIN_REQUESTS, self.users) if quick else self.requests,
            warmup=min(self.users, QUICK_WARMUP if quick else MAX_WARMUP),
            input_tokens=Span(self.own_tokens, self.own_tokens),
            output_tokens=Span(OUTPUT_TOKENS, OUTPUT_TOKENS),
            shared_prefix_tokens=self.shared_tokens,
            seed=seed * 100 + LEVELS.index(self),
        )

    def check(self, report: LevelReport) -> list[str]:
        """What makes this level's numbers doubtful; empty if nothing does."""
        doubts = [f"failed {group.count}×: {group.example}" for group in report.failures]
        if report.interrupted:
            doubts.append("interrupted")
        if report.succeeded and report.prompt_tokens is not None:
            mean = report.prompt_tokens / report.succeeded
            if abs(mean - self.prompt_tokens) > PROMPT_SLACK_TOKENS:
                doubts.append(f"prompts have {mean:.1f} tokens, not {self.prompt_tokens}")
        return doubts


LEVELS = (
    Level("1", "1 user", users=1, requests=12),
    Level("4", "4 users", users=4, requests=24),
    Level("16", "16 users", users=16, requests=64),
    Level("32", "32 users", users=32, requests=128),
    Level("shared", "512 shared, 8 users", users=8, requests=32, own_tokens=64, shared_tokens=512),
)
