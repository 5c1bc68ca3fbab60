"""Does a real model say on a GPU what its weights say? Greedy tokens of the engine, judged by the eager reference.

    python -m benchmarks.gpu_model ~/.cache/tonle/models/SmolLM2-135M-Instruct.Q4_1.gguf
    python -m benchmarks.gpu_model MODEL --device cpu          # the same check of the CPU path

Does: chat questions and raw text, alone and in a batch of 64, through `InferenceEngine`; prints answers, agreement and a
verdict, which is the exit status. Does not: need transformers or a network. A token must be the reference's best one, or so
close to it that rounding decides.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from benchmarks.eager import TIES, gaps
from tonle.config.engine import EngineConfig
from tonle.engine.device import choose_device
from tonle.engine.inference_engine import InferenceEngine
from tonle.engine.request import GenerationConfig
from tonle.engine.text import Text, load_text
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.source import resolve

NEW = 64
MIN_SAME = 0.97  # share of tokens that are the reference's best; the others must be ties
QUESTIONS = ["What is the capital of France?", "Name three colours.", "How many days does a week have?"]
TEXTS = [
    "The capital of France is", "def fibonacci(n):\n", "ភ្នំពេញ គឺជា",
    "Once upon a time, in a village by a great river, there lived " * 12,
]  # fmt: skip
CROWD = 64


def prompts_of(text: Text) -> list[list[int]]:
    chats = []
    if text.chat_template is not None:
        chats = [text.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [*chats, *(text.encode(prompt) for prompt in TEXTS)]


def generate(engine: InferenceEngine, prompts: list[list[int]]) -> list[list[int]]:
    """All at once."""
    config = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
    ids = [engine.submit_request(prompt, config) for prompt in prompts]
    return [engine.result(request_id).output_ids[0] for request_id in ids]


def judge(label: str, reference: Decoder, prompts: list[list[int]], outputs: list[list[int]]) -> bool:
    found = torch.cat([gaps(reference, *pair) for pair in zip(prompts, outputs, strict=True)])
    same, worst = float((found == 0).float().mean()), float(found.max())
    good = same >= MIN_SAME and worst <= TIES[reference.dtype]
    print(f"{'ok  ' if good else 'FAIL'} {label}: {same:.2%} of {len(found)} tokens are the reference's best, the worst is "
          f"{worst:.3%} below it (a tie: {TIES[reference.dtype]:.3%})", flush=True)  # fmt: skip
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a .gguf file or a folder; the default model if left out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    arguments = parser.parse_args()
    source, device = resolve(arguments.model), choose_device(arguments.device)
    text = load_text(source)
    dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    began = time.perf_counter()
    reference = load(source, device=device, dtype=dtype)
    print(f"{source.name} on {device}, {reference.dtype}: read in {time.perf_counter() - began:.1f} s")
    config = EngineConfig(
        device=str(device),
        dtype=arguments.dtype,
        memory_pool_size=2**30,
        max_batch_size=CROWD,
        generation_config="none",
    )  # the reference knows no repetition penalty
    prompts = prompts_of(text)
    with InferenceEngine(source.path, config=config) as engine:
        alone = [generate(engine, [prompt])[0] for prompt in prompts]
        crowd = [text.encode(f"{i}. Tell me about the number {i}") for i in range(CROWD - len(prompts))]
        together = generate(engine, [*prompts, *crowd])
    for prompt, output in zip(prompts, alone, strict=True):
        print(f"  {text.decode(prompt)[-40:]!r} -> {text.decode(output)[:90]!r}")
    verdicts = [judge("alone", reference, prompts, alone),
                judge(f"{CROWD} at once", reference, [*prompts, *crowd], together)]  # fmt: skip
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
