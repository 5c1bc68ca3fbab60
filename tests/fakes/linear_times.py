"""`LinearTimes`: step times by a formula, for simulations whose results can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass

from tonle.engine.schedule import SchedulerLimits, StepWork
from tonle.simulate.fleet import ReplicaOptions
from tonle.simulate.trace import TraceRequest


@dataclass(frozen=True)
class LinearTimes:
    """Seconds. By default a small CPU."""

    lag: int = 0
    front_s: float = 0.003
    back_s: float = 0.001
    step_s: float = 0.005
    row_s: float = 0.0012
    token_s: float = 0.0004
    read_s: float = 0.0
    launch_s: float = 0.0  # of the host, before a step,
    publish_s: float = 0.0  # and after its tokens

    def host_s(self, work: StepWork) -> float:
        return self.launch_s + self.publish_s

    def commit_s(self, work: StepWork) -> float:
        return self.publish_s

    def device_s(self, work: StepWork) -> float:
        reads = work.decode_reads + work.prompt_reads
        return self.step_s + self.row_s * work.rows + self.token_s * work.tokens + self.read_s * reads


H200 = LinearTimes(lag=1, step_s=0.0016, row_s=1e-5, token_s=4e-6, launch_s=0.0003)


def limits(**changes: object) -> SchedulerLimits:
    """512 tokens a step, 32 rows."""
    settings: dict[str, object] = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "context_length": 2048,
        "block_size": 16,
        "long_prefill_tokens": 256,
        **changes,
    }
    return SchedulerLimits(**settings)  # type: ignore[arg-type]


def replica_options(times: LinearTimes | None = None, num_blocks: int = 4000, **fields: object) -> ReplicaOptions:
    return ReplicaOptions(times=times or LinearTimes(), limits=limits(), num_blocks=num_blocks, **fields)  # type: ignore[arg-type]


def asked(index: int, at_s: float | None, prompt: int | list[int], output: int, **fields: object) -> TraceRequest:
    """A request. With a number for its prompt: so many tokens that no other prompt begins with."""
    tokens = [index + 1, *range(1, prompt)] if isinstance(prompt, int) else prompt
    return TraceRequest(index=index, arrival_s=at_s, prompt=tokens, output_tokens=output, **fields)  # type: ignore[arg-type]
