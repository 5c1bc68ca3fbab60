"""`EncoderKind`: what embeddings and cross-encoders have in common in a worker process.

Jobs carry token ids (`ids`: int32, `types`: uint8, as bytes); a job with `describe` asks what the HTTP process must know to
make them (`TextFacts`).

Does: load, pack a batch into passes without padding, give each job its row. Does not: tokenize, or know what a row means.
"""

from __future__ import annotations

import abc
from typing import Any

import msgspec
import numpy as np
import torch

from tonle.engine.device import choose_device
from tonle.errors import ConfigError, InvalidRequest, TonleError
from tonle.workers.encoders.folder import EncoderFolder, find_folder, read_folder
from tonle.workers.encoders.open_encoder import EncoderModel, Rows
from tonle.workers.encoders.packed import pack, passes
from tonle.workers.encoders.text import TextFacts, Tokens
from tonle.workers.encoders.token_job import read_tokens, token_job
from tonle.workers.kind import Job, Kind, Result

# Tokens of one forward pass, which bounds its memory: some 100 MB with the sizes of BERT-large on a CPU.
_PASS_TOKENS = {"cpu": 4096, "cuda": 65_536}
_OPTIONS = ("dtype", "matryoshka_dimensions", "max_tokens", "onnx", "pooling", "threads")


class EncoderKind(Kind):
    model: EncoderModel
    folder: EncoderFolder

    @abc.abstractmethod
    def open(self, folder: EncoderFolder, device: torch.device, options: dict[str, Any]) -> EncoderModel: ...

    @abc.abstractmethod
    def result(self, job: Job, row: Rows) -> Result | TonleError:
        """`row`: (width,)."""

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        unknown = options.keys() - set(_OPTIONS)
        if unknown:
            raise ConfigError(
                f"there is no option {min(unknown)!r}; there are {', '.join(_OPTIONS)}", param=min(unknown)
            )
        if (threads := options.get("threads")) is not None:
            if not isinstance(threads, int) or threads < 1:
                raise ConfigError(f"threads must be an integer of at least 1, not {threads!r}", param="threads")
            torch.set_num_threads(threads)
        where = choose_device(device)
        self.folder = read_folder(find_folder(model), options)
        self.model = self.open(self.folder, where, options)
        self._pass_tokens = _PASS_TOKENS.get(where.type, 4096)
        self.max_tokens = min(self.model.max_tokens, self.folder.max_tokens or self.model.max_tokens)

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        prepared = [self._prepare(job) for job in batch]
        found: dict[int, Result | TonleError] = {
            place: each for place, each in enumerate(prepared) if not isinstance(each, Tokens)
        }
        places = [place for place in range(len(batch)) if place not in found]
        tokens = [each for each in prepared if isinstance(each, Tokens)]
        for some in passes([len(each.ids) for each in tokens], self._pass_tokens):
            packed = pack([tokens[each] for each in some])
            rows = self.model.rows(packed)
            for row, place in zip(rows, packed.order, strict=True):
                where = places[some[place]]
                found[where] = self.result(batch[where], row)
        return [found[place] for place in range(len(batch))]

    def _prepare(self, job: Job) -> Tokens | Result | TonleError:
        """What to compute, or the answer to a job that needs no model. A bad id would end the batch, on a GPU the process."""
        if job.fields.get("describe"):
            return Result(msgspec.to_builtins(self._text_facts()))
        try:
            tokens = read_tokens(job)
        except InvalidRequest as error:
            return error
        ids = tokens.ids
        if not 0 < len(ids) <= self.max_tokens:
            return InvalidRequest(f"an input has {len(ids)} tokens; the model takes 1 to {self.max_tokens}")
        if ids.min() < 0 or ids.max() >= self.model.vocab_size:
            return InvalidRequest(f"the model has tokens 0 to {self.model.vocab_size - 1}")
        return tokens

    def warm_up(self) -> list[Job]:
        longest = min(self.max_tokens, 128)
        return [token_job(Tokens(np.zeros(length, np.int32))) for length in (min(8, longest), longest)]

    def _text_facts(self) -> TextFacts:
        folder = self.folder
        return TextFacts(
            tokenizer=str(folder.tokenizer), max_tokens=self.max_tokens, vocab_size=self.model.vocab_size,
            dimensions=self.dimensions, prompts=dict(folder.prompts), default_prompt=folder.default_prompt,
            lower_case=folder.lower_case, matryoshka=None if folder.matryoshka is None else list(folder.matryoshka),
        )  # fmt: skip

    @property
    def dimensions(self) -> int:
        """Of a vector; 0: it gives none."""
        return 0

    def describe(self) -> dict[str, Any]:
        return {
            "architecture": self.folder.config.get("model_type"), "max_tokens": self.max_tokens,
            "runtime": "torch" if self.folder.onnx is None else "onnxruntime",
        }  # fmt: skip
