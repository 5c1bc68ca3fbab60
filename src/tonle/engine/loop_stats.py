"""What a loop tells of its state after a step, gathered from its parts."""

from __future__ import annotations

from tonle.engine.messages import LoopStats
from tonle.engine.schedule import Scheduler


def note_scheduler(stats: LoopStats, scheduler: Scheduler, num_compiling: int) -> None:
    """`num_compiling`: requests that wait for their grammars, which the scheduler does not have yet."""
    pool = scheduler.pool
    stats.num_running = len(scheduler.running)
    stats.num_waiting = len(scheduler.waiting) + len(scheduler.loading) + num_compiling
    stats.num_free_blocks = pool.num_free
    stats.num_cached_blocks = pool.num_idle
    stats.kv_usage = pool.num_held / pool.num_blocks
    stats.prefix_queries = scheduler.prefix_queries
    stats.prefix_hits = scheduler.prefix_hits
    stats.prefix_missed = scheduler.prefix_missed
    stats.num_preemptions = scheduler.num_preemptions
    stats.prompt_tokens = scheduler.prompt_tokens
    if (drafts := scheduler.drafts) is not None and drafts.num_drafts > stats.num_drafts:
        stats.num_drafts, stats.draft_tokens = drafts.num_drafts, drafts.num_tokens
        stats.accepted_tokens, stats.accepted_at = drafts.num_accepted, list(drafts.accepted_at)
