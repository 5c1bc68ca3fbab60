"""Small encoders with random weights, as transformers saves them, with a tokenizer; and a pool without processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tonle.errors import TonleError
from tonle.workers.kind import Job, Kind, Result
from tonle.workers.pool_config import PoolConfig

WORDS = ["the", "cat", "purr", "##s", "paris", "is", "capital", "of", "france", "what", "dog", "bark", "a", "b", "c"]
SPECIAL = ["<s>", "[PAD]", "</s>", "[UNK]"]
VOCAB_SIZE = 64
FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert")
HEADS = {
    "bert": transformers.BertForSequenceClassification,
    "roberta": transformers.RobertaForSequenceClassification,
    "xlm-roberta": transformers.XLMRobertaForSequenceClassification,
    "modernbert": transformers.ModernBertForSequenceClassification,
}
BODIES = {
    "bert": transformers.BertModel,
    "roberta": transformers.RobertaModel,
    "xlm-roberta": transformers.XLMRobertaModel,
    "modernbert": transformers.ModernBertModel,
}


def save_encoder(family: str, folder: Path, *, num_labels: int | None = None, **settings: Any) -> Any:
    """`num_labels`: a cross-encoder with as many. Returns the model of transformers."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    if family == "modernbert":
        sizes |= {"cls_token_id": 0, "sep_token_id": 2, "local_attention": 8}
    if family in ("roberta", "xlm-roberta"):
        sizes |= {"type_vocab_size": 1}
    classes = BODIES if num_labels is None else HEADS
    labels = {} if num_labels is None else {"num_labels": num_labels}
    torch.manual_seed(7)
    config = classes[family].config_class(**sizes | labels | settings)
    with torch.random.fork_rng():
        model = classes[family](config).eval()
        for parameter in model.parameters():  # norms and biases, too: those of a new model are ones and zeros
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json")
    return model


def save_tokenizer(file: Path) -> None:
    """Word pieces; a text is `<s> … </s>`, and the second of a pair has type 1. As many files do, it cuts and pads."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # type: ignore[arg-type]
    tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(file))


def save_modules(
    folder: Path, pooling: dict[str, Any], *, prompts: dict[str, str] | None = None, max_tokens: int | None = None
) -> None:
    """What sentence-transformers writes beside the weights."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))
    if max_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))


class InlinePool:
    """Runs each job in this process, alone; notes how many were in it at once."""

    def __init__(self, kind: Kind, *, max_batch: int = 4) -> None:
        self.config = PoolConfig(kind="embeddings", max_batch=max_batch)
        self.model = "tiny"
        self.kind = kind
        self.jobs: list[Job] = []
        self.num_inside = self.most_inside = 0
        self._changed = asyncio.Event()

    async def run(self, job: Job, *, timeout_s: float | None = None) -> Result:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            await asyncio.sleep(0)
            self.jobs.append(job)
            self._changed.set()
            (found,) = self.kind.run([job])
        finally:
            self.num_inside -= 1
        if isinstance(found, TonleError):
            raise found
        return found

    async def until(self, num_jobs: int) -> None:
        """So many have begun."""
        while len(self.jobs) < num_jobs:
            self._changed.clear()
            await self._changed.wait()


class KeptReply:
    """A sink."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    def attach(self, press: Any) -> None: ...

    def know(self, answer: Any) -> None: ...

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def data(self, piece: bytes) -> None:
        self.body += piece


def token_ids(count: int, lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(4, VOCAB_SIZE, (lengths[place % len(lengths)],), generator=generator).tolist()
        for place in range(count)
    ]
