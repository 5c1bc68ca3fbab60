"""Three programs that measure a server: `tonle bench`, `vllm bench serve` and `guidellm`, as data for `clients.py`.

Does: give the command of each for one and the same load, and read what it measured out of the file that it writes.
Does not: start anything. Latencies are the programs' own; `benchmarks/README.md` says where their words differ from ours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol


class ClientFailedError(Exception):
    """A program did not run to its end, or its result is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Task:
    """One turn of one program."""

    url: str
    model: str
    tokenizer: Path  # a Hugging Face folder, for the programs that count tokens themselves
    kind: Literal["users", "rate"]  # closed loop, or requests per second at even intervals
    value: float
    prompts: Sequence[str]  # one request each, every one of `input_tokens`
    input_tokens: int
    output_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.prompts) * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one program measured in one turn: means over its requests, rates from the first request to the last answer."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    begin: tuple[Clock, float] | None = None  # of the load; None: it counts its CPU time itself
    end: tuple[Clock, float] | None = None
    client_cpu_s: float | None = (
        None  # of the load alone, without start-up; filled in by the caller where `begin` is set
    )


Clock = Literal["monotonic", "wall"]


class ClientProgram(Protocol):
    """A program on disk."""

    @property
    def name(self) -> str: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    def command(self, task: Task, folder: Path) -> list[str]: ...
    def read(self, task: Task, folder: Path) -> Turn: ...


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def expect(name: str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise ClientFailedError(f"{name}: {what} should be {wanted}, but the result says {found}")


@dataclass(frozen=True, slots=True)
class TonleBench:
    """The command line, out of the environment that runs this script."""

    name: str = "tonle bench"
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, task: Task, folder: Path) -> list[str]:
        lines = ({"prompt": prompt, "max_tokens": task.output_tokens} for prompt in task.prompts)
        file = write_lines(folder / "prompts.jsonl", lines)
        load = ["--concurrency", f"{task.value:g}"]
        if task.kind == "rate":
            load = ["--rate", f"{task.value:g}", "--arrivals", "constant"]
        return [
            *(sys.executable, "-m", "tonle", "bench", "--url", task.url, "--model", task.model, "--file", str(file)),
            *(*load, "--requests", str(len(task.prompts)), "--warmup", "0", "--ignore-eos", "--temperature", "0"),
            *("--quiet", "--json", str(folder / "result.json")),
        ]

    def read(self, task: Task, folder: Path) -> Turn:
        level = json.loads((folder / "result.json").read_bytes())["levels"][0]
        expect(self.name, "answered requests", level["succeeded"], len(task.prompts))
        expect(self.name, "output tokens", level["output_tokens"], task.num_output_tokens)
        expect(self.name, "prompt tokens", level["prompt_tokens"], len(task.prompts) * task.input_tokens)
        return Turn(
            ttft_ms=level["ttft_ms"]["mean"],
            tpot_ms=level["tpot_ms"]["mean"],
            output_tokens_per_s=level["output_tokens_per_s"],
            requests_per_s=level["requests_per_s"],
            ttft_p50_ms=level["ttft_ms"]["p50"],
            tpot_p50_ms=level["tpot_ms"]["p50"],
            client_cpu_s=level["client_cpu_share"] * level["duration_s"],
        )


@dataclass(frozen=True, slots=True)
class VllmBench:
    """`vllm bench serve`."""

    program: Path
    name: str = "vllm bench serve"
    env: Mapping[str, str] = field(default_factory=lambda: {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})

    def command(self, task: Task, folder: Path) -> list[str]:
        file = write_lines(folder / "prompts.jsonl", ({"prompt": prompt} for prompt in task.prompts))
        load = ["--max-concurrency", f"{task.value:g}"]
        if task.kind == "rate":
            load = ["--request-rate", f"{task.value:g}", "--burstiness", "inf"]
        return [
            *(str(self.program), "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
            *("--base-url", task.url, "--model", task.model, "--tokenizer", str(task.tokenizer)),
            *("--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template", "--disable-shuffle"),
            *("--custom-output-len", str(task.output_tokens), "--num-prompts", str(len(task.prompts)), *load),
            # No ready check and no warm-up: both send the first prompt, which then is in the server's prefix cache.
            *("--ready-check-timeout-sec", "0", "--num-warmups", "0", "--ignore-eos", "--temperature", "0"),
            *("--disable-tqdm", "--save-result", "--save-detailed", "--result-filename", str(folder / "result.json")),
        ]

    def read(self, task: Task, folder: Path) -> Turn:
        result = json.loads((folder / "result.json").read_bytes())
        expect(self.name, "answered requests", result["completed"], len(task.prompts))
        expect(self.name, "output tokens", result["total_output_tokens"], task.num_output_tokens)
        expect(self.name, "prompt tokens", result["total_input_tokens"], len(task.prompts) * task.input_tokens)
        # Its own duration begins before the first request: by one interval in an open loop.
        begin_s = min(result["start_times"])
        end_s = max(start + took for start, took in zip(result["start_times"], result["latencies"], strict=True))
        return Turn(
            ttft_ms=result["mean_ttft_ms"],
            tpot_ms=result["mean_tpot_ms"],
            output_tokens_per_s=result["total_output_tokens"] / (end_s - begin_s),
            requests_per_s=result["completed"] / (end_s - begin_s),
            ttft_p50_ms=result["median_ttft_ms"],
            tpot_p50_ms=result["median_tpot_ms"],
            begin=("monotonic", begin_s),
            end=("monotonic", end_s),
        )


@dataclass(frozen=True, slots=True)
class Guidellm:
    """`guidellm run`. What we call TPOT is its inter-token latency; its TPOT includes the first token."""

    program: Path
    name: str = "guidellm"
    env: Mapping[str, str] = field(default_factory=lambda: {"HF_HUB_OFFLINE": "1"})

    def command(self, task: Task, folder: Path) -> list[str]:
        lines = ({"prompt": prompt, "output_tokens_count": task.output_tokens} for prompt in task.prompts)
        file = write_lines(folder / "prompts.jsonl", lines)
        backend = f"kind=openai_http,target={task.url},model={task.model},request_format=/v1/completions"
        profile = f"kind=concurrent,streams={task.value:g}"
        if task.kind == "rate":
            profile = f"kind=constant,rate={task.value:g}"
        return [
            *(str(self.program), "run", "--backend", f"{backend},extras.body.temperature=0", "--profile", profile),
            *("--constraint", f"kind=max_requests,count={len(task.prompts)}"),
            *("--data", f"kind=json_file,path={file}", "--tokenizer", f"kind=huggingface_auto,model={task.tokenizer}"),
            *("--output", f"kind=json,path={folder / 'result.json'}", "--disable-console"),
        ]

    def read(self, task: Task, folder: Path) -> Turn:
        benchmark = json.loads((folder / "result.json").read_bytes())["benchmarks"][0]
        requests = benchmark["requests"]["successful"]
        expect(self.name, "answered requests", len(requests), len(task.prompts))
        expect(self.name, "output tokens", sum(row["output_tokens"] for row in requests), task.num_output_tokens)
        num_prompt_tokens = sum(row["prompt_tokens"] for row in requests)
        expect(self.name, "prompt tokens", num_prompt_tokens, len(requests) * task.input_tokens)
        metrics = {name: summary["successful"] for name, summary in benchmark["metrics"].items() if name in USED}
        return Turn(
            ttft_ms=metrics["time_to_first_token_ms"]["mean"],
            tpot_ms=fmean(row["inter_token_latency_ms"] for row in requests),
            output_tokens_per_s=metrics["output_tokens_per_second"]["mean"],
            requests_per_s=metrics["requests_per_second"]["mean"],
            ttft_p50_ms=metrics["time_to_first_token_ms"]["median"],
            tpot_p50_ms=metrics["inter_token_latency_ms"]["median"],
            begin=("wall", benchmark["start_time"]),
            end=("wall", benchmark["end_time"]),
        )


USED = ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second", "requests_per_second")
