"""What crosses the mailbox between a front and an engine loop. One `Step` per step, arrays rather than objects."""

from __future__ import annotations

import msgspec

from tonle.engine.kv.tiers.tier import TierCounts
from tonle.engine.request import GenerationDefaults, KeptBlocks, Request, TokenLogprob
from tonle.errors import InternalError, ModelError, TonleError
from tonle.telemetry.time_spent import TimeSpent


class Submit(msgspec.Struct, tag="submit", array_like=True):
    requests: list[Request]


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    handles: list[int]


class DropCache(msgspec.Struct, tag="drop_cache", array_like=True):
    """Forget every idle cached block, and the recent answers that guesses come from."""


class ReleaseMemory(msgspec.Struct, tag="release_memory", array_like=True):
    """Forget every cached block and all recent answers, and give the memory of all blocks back to the system until they are used
    again. Comes when nothing is under way."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", array_like=True):
    """Read a LoRA adapter from `path` and serve it as `name`. Answered by an `AdapterReply` with the same number."""

    reply: int
    name: str
    path: str
    replace: bool = False  # another adapter may have the name: requests from now on get the new one


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", array_like=True):
    """Take the name away. Requests under way end as they would have."""

    reply: int
    name: str


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End the loop. Whatever still runs is cancelled."""


class ModelCard(msgspec.Struct, tag="ready", array_like=True):
    """The engine is ready, and this is what it serves."""

    architecture: str
    context_length: int  # most tokens of one request, prompt and output
    vocab_size: int
    eos_ids: list[int]
    device: str
    dtype: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    load_s: float
    stored: str = (
        ""  # what the model's files hold: a dtype, a GGML type such as Q4_1, or awq; empty if weights are made up
    )
    defaults: GenerationDefaults = GenerationDefaults()  # of requests that leave a field out
    gpu: str = ""  # UUID of the NVIDIA GPU that computes; empty if none does
    max_loras: int = 0  # adapters that can be computed together; 0: the engine takes none
    hidden_size: int = 0  # numbers of an embedding
    engine_id: int = 0  # drawn when the engine starts, so that a front knows whether it is another one
    role: str = ""  # prefill, decode or both: what it does with other engines; empty: nothing
    quantized_to: str = ""  # what matrices became when they were loaded: int8, int4, fp8; empty: they are as stored
    kv_dtype: str = ""  # of keys and values, as torch names it


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter that requests can name."""

    name: str
    id: int  # given by the engine, never to another content; 0 would be the base model
    digest: str  # SHA-256, hex, of what it computes
    rank: int
    path: str


class Adapters(msgspec.Struct, tag="adapters", array_like=True):
    """All adapters there are: before the `ModelCard`, and after each change."""

    adapters: list[AdapterInfo]


class AdapterReply(msgspec.Struct, tag="adapter_reply", array_like=True):
    """What became of a `LoadAdapter` or an `UnloadAdapter`; comes after the `Adapters` that it led to."""

    reply: int
    error: str | None = None
    caller_fault: bool = True  # wrong files or a wrong name rather than a bug

    @property
    def exception(self) -> TonleError | None:
        if self.error is None:
            return None
        return ModelError(self.error) if self.caller_fault else InternalError(self.error)


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The engine could not start, or stopped for this reason."""

    message: str
    caller_fault: bool  # a wrong setting or model file rather than a bug

    @property
    def error(self) -> TonleError:
        return ModelError(self.message) if self.caller_fault else InternalError(self.message)


class AdaptiveStats(msgspec.Struct, array_like=True):
    """What adaptive tuning allows now, and what it has learnt."""

    max_num_batched_tokens: int  # tokens of a step in which sequences decode
    prefill_share: float  # of a step, that one prompt may take while others are present
    max_num_seqs: int  # sequences that may run
    target_itl_ms: float | None
    target_ttft_ms: float | None
    num_changes: int = 0
    unreachable: list[str] = []  # targets that cannot be met
    slow_share: float = 0.0  # of the last hundred steps or so, those beyond target_itl_ms
    step_ms: float | None = None  # what a step costs (None: not known yet): at least,
    row_ms: float | None = None  # for each sequence that decodes,
    token_ms: float | None = None  # for each token of a prompt,
    read_ms: float | None = None  # and for each earlier token that attention reads
    margin: float = 1.0  # 99 of 100 mixed steps take at most so many times what is expected of them


class TransferStats(msgspec.Struct, array_like=True):
    """Keys and values that come from elsewhere, and that are kept for others. Counters only grow."""

    num_loading: int = 0  # requests whose prompt is on its way
    loaded: dict[str, int] = {}  # by source: requests whose blocks have come,
    failed: dict[str, int] = {}  # and those that computed them instead, all or some
    loaded_tokens: int = 0  # of prompts, that were not computed here
    num_leases: int = 0  # prompts kept for other engines,
    num_leased_blocks: int = 0  # and their blocks
    leases_granted: int = 0
    leases_fetched: int = 0
    leases_expired: int = 0  # nobody came


class LoopStats(msgspec.Struct, array_like=True):
    """The engine's state after a step. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # neither used by a request nor cached
    num_cached_blocks: int = 0  # idle, kept for reuse
    kv_usage: float = 0.0  # share of blocks that running requests hold, 0..1
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    prefix_missed: dict[str, int] = {}  # prompt tokens not found, by `MissReason`
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0  # computed, not counting cache hits
    generation_tokens: int = 0
    busy_s: float = 0.0  # time spent in steps
    profile: dict[str, float] = {}  # seconds per part of the step, if asked for
    adaptive: AdaptiveStats | None = None
    running_adapters: list[str] = []  # names of those that running requests use,
    waiting_adapters: list[str] = []  # and of those that waiting ones do
    kv_tiers: dict[str, TierCounts] = {}  # by name; empty: evicted blocks are gone
    kv_event_batches: int | None = None  # sent; None: nobody is told of cached blocks
    kv_event_batches_lost: int = 0
    transfers: TransferStats | None = None  # of keys and values; None: with no other engine
    num_drafts: int = 0  # times that a step had guesses for a sequence,
    draft_tokens: int = 0  # guesses,
    accepted_tokens: int = 0  # those that were right,
    accepted_at: list[int] = []  # and the same by their place among the guesses; another list after each change


ADAPTER_UNREADABLE = (
    "adapter_unreadable"  # why a request is finished: the files of its adapter are gone or have changed
)


class Step(msgspec.Struct, tag="step", array_like=True):
    """What one step produced. `handles[i]` got the next `counts[i]` entries of `tokens`."""

    handles: list[int]
    counts: list[int]
    tokens: list[int]
    finished: dict[int, tuple[str, int | None]] = {}  # handle -> reason, the stop token that matched
    refused: dict[int, str] = {}  # handle -> why it can never run, or cannot go on as it was asked to
    started: dict[int, tuple[float, int]] = {}  # handle -> when first scheduled, prompt tokens found in cache
    logprobs: dict[int, list[TokenLogprob]] = {}  # handle -> one per token of this step
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = {}  # handle -> place of the first in the prompt, each
    embeddings: dict[int, bytes] = {}  # handle -> float32 of its embedding, little-endian; it is among `finished`
    kept: dict[int, KeptBlocks] = {}  # handle -> where its blocks are; of those among `finished`
    spent: dict[int, TimeSpent] = {}  # handle -> where its time went; of those among `finished`
    guesses: dict[int, tuple[int, int]] = {}  # handle -> guesses that were checked for it, how many of them were right
    stats: LoopStats = msgspec.field(default_factory=LoopStats)


ToEngine = Submit | Cancel | DropCache | ReleaseMemory | LoadAdapter | UnloadAdapter | Stop
ToFront = ModelCard | Failed | Step | Adapters | AdapterReply
