"""The two sides of `baseline.py` on the same weights: plain `transformers`, and Tonle.

Does: load a model for both, run a list of jobs on either, and say when each answer's first and last token came and what keys and
values took. Does not: compare or print.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.device_use import DeviceUse
from benchmarks.eager import TIES
from benchmarks.peers.files import made_once
from benchmarks.workload import SHAPES, Job
from tonle import EngineConfig, GenerationConfig, InferenceEngine
from tonle.models.source import ModelSource

POLL_S = 0.0005  # well below a step


@dataclass
class Outcome:
    """What one side did with a list of jobs that were all there at the start. Seconds are from that start."""

    seconds: float = 0.0
    first_token_s: list[float] = field(default_factory=list)  # by job
    finished_s: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    kv_bytes: int = 0  # the most that keys and values took at a time
    use: float | None = None  # of the device, 0 to 1

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were asked for: what a padded batch computes beyond that counts for nothing."""
        return sum(map(len, self.outputs)) / self.seconds


class Naive:
    """`model.generate`, with everything at its default."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, jobs: Sequence[Job], batch_size: int) -> Outcome:
        """In order of arrival, `batch_size` at a time; a batch takes as long as its longest answer."""
        outcome, began_s = Outcome(), time.monotonic()
        with DeviceUse(self.model.device.type) as use:
            for start in range(0, len(jobs), batch_size):
                batch = jobs[start : start + batch_size]
                outputs, first_s, kv_bytes = self.generate(batch)
                outcome.outputs += [row[:count] for row, (_, count) in zip(outputs, batch, strict=True)]
                outcome.first_token_s += [first_s - began_s] * len(batch)
                outcome.finished_s += [time.monotonic() - began_s] * len(batch)
                outcome.kv_bytes = max(outcome.kv_bytes, kv_bytes)
        outcome.seconds, outcome.use = time.monotonic() - began_s, use.share
        return outcome

    @torch.inference_mode()
    def generate(self, batch: Sequence[Job]) -> tuple[list[list[int]], float, int]:
        """New tokens of each row, when the first ones were there (monotonic), and the bytes of all keys and values."""
        longest = max(len(prompt) for prompt, _ in batch)
        rows = [[0] * (longest - len(prompt)) + prompt for prompt, _ in batch]  # padded on the left
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch]
        moments: list[float] = []

        def note(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            """Called after each token."""
            if not moments:
                _ = ids[0, -1].item()  # a GPU has computed it
                moments.append(time.monotonic())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids = torch.tensor(rows, device=self.model.device)
        out = self.model.generate(
            ids, attention_mask=torch.tensor(mask, device=self.model.device), do_sample=False, eos_token_id=None,
            pad_token_id=0, max_new_tokens=max(count for _, count in batch), return_dict_in_generate=True,
            stopping_criteria=[note],
        )  # fmt: skip
        cache = [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return out.sequences[:, longest:].tolist(), moments[0], sum(tensor.nbytes for tensor in cache)

    @torch.inference_mode()
    def agreement(self, jobs: Sequence[Job], outputs: Sequence[list[int]]) -> tuple[int, int, float]:
        """Of other tokens than ours, given the text before them: how many are the best, how many that or tie with it, and
        how far the worst lies below the best, as a share of it."""
        best = ties = 0
        worst = 0.0
        for (prompt, _), output in zip(jobs, outputs, strict=True):
            logits = self.model(torch.tensor([prompt + output[:-1]], device=self.model.device)).logits[0].float()
            logits = logits[len(prompt) - 1 :]  # [output, vocab]
            top = logits.amax(1)
            theirs = logits.gather(1, torch.tensor(output, device=logits.device)[:, None]).squeeze(1)
            gaps = (top - theirs) / top.abs()
            best += int((gaps == 0).sum())
            ties += int((gaps <= TIES[self.model.dtype]).sum())
            worst = max(worst, float(gaps.max()))
        return best, ties, worst


class Ours:
    """`InferenceEngine`, all jobs at once."""

    def __init__(self, engine: InferenceEngine, pool_bytes: int) -> None:
        self.engine = engine
        self._block_bytes = pool_bytes / engine.get_stats()["cache_info"]["num_blocks"]

    def run(self, jobs: Sequence[Job], device: str) -> Outcome:
        outcome, began_s = Outcome(), time.monotonic()
        with DeviceUse(device) as use:
            results = [self.engine.result(request_id) for request_id in self._submit(jobs)]
        outcome.seconds, outcome.use = time.monotonic() - began_s, use.share
        for result in results:
            assert result.timings.first_token_s is not None and result.timings.finished_s is not None
            outcome.outputs.append(result.output_ids[0])
            outcome.first_token_s.append(result.timings.first_token_s - began_s)
            outcome.finished_s.append(result.timings.finished_s - began_s)
        return outcome

    def kv_peak_bytes(self, jobs: Sequence[Job]) -> int:
        """The most that the blocks of these requests took at a time: a run of its own, because it watches all the while."""
        shares, done = [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(POLL_S):
                shares.append(self.engine.get_stats()["memory_usage"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for request_id in self._submit(jobs):
                self.engine.result(request_id)
        finally:
            done.set()
            watcher.join()
        blocks = max(shares) * self.engine.get_stats()["cache_info"]["num_blocks"]
        return round(round(blocks) * self._block_bytes)

    def _submit(self, jobs: Sequence[Job]) -> list[str]:
        return [self.engine.submit_request(prompt, greedy(count)) for prompt, count in jobs]


def wait_for_kernels() -> None:
    """Until the CPU kernels of engines in this process are compiled: before, their steps run through torch."""
    for thread in threading.enumerate():
        if thread.name == "tonle-warm":
            thread.join()


def greedy(count: int) -> GenerationConfig:
    """Exactly so many tokens."""
    return GenerationConfig(max_length=count, do_sample=False, early_stopping=False)


def engine_config(device: str, dtype: str, pool_bytes: int, context: int) -> EngineConfig:
    """No defaults of the model's (a repetition penalty would change greedy tokens), no metrics (they are polled)."""
    return EngineConfig(
        device=device, dtype=dtype, memory_pool_size=pool_bytes, max_sequence_length=context, generation_config="none",
        max_batch_size=None, enable_metrics=False,
    )  # fmt: skip


def transformers_model(source: ModelSource, device: str, dtype: torch.dtype) -> Any:
    """The weights of these files as `transformers` reads them."""
    from transformers import AutoModelForCausalLM

    folder = (
        source.path
        if source.kind == "folder"
        else made_once(f"{source.path.stem}-transformers", partial(_unpack, source))
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def _unpack(source: ModelSource, folder: Path) -> None:
    """A GGUF file to float32, by `transformers`: as `from_pretrained(gguf_file=…)`, without accelerate, which that needs."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    if missing not in ([], ["lm_head.weight"]):  # the latter is tied
        raise SystemExit(f"transformers found no weights for {', '.join(missing)} in {source.path}")
    model.save_pretrained(folder)


def save_random(name: str, root: Path) -> Path:
    """A folder with random weights of one of `SHAPES`, and a tokenizer with a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape, folder = SHAPES[name], root / name
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(shape["vocab_size"]), eos_token="▁w2")
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """One word for each token: for models without a tokenizer of their own."""
    words = Tokenizer(models.WordLevel({f"▁w{token}": token for token in range(vocab_size)}, unk_token="▁w0"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return words
