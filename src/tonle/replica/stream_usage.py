"""`StreamUsage`: where a stream carries usage, as its `stream_options` ask.

Does: decide what stands in each chunk. Does not: count; the job does.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from tonle.protocol.openai import StreamOptions, WireUsage
from tonle.replica.job import Job


class StreamUsage:
    def __init__(self, options: StreamOptions | None, job: Job) -> None:
        self.at_end = options is not None and bool(options.include_usage)
        self._throughout = options is not None and bool(options.continuous_usage_stats)
        self._job = job

    def in_chunk(self) -> WireUsage | UnsetType | None:
        if self._throughout:
            return self._job.wire_usage
        # OpenAI puts a null into every chunk of a stream that will end with the usage.
        return None if self.at_end else UNSET
