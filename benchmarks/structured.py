"""Structured output: are all answers valid, and what does it cost?

    python -m benchmarks.structured                                             # all tables, on the default model
    python -m benchmarks.structured --only validity --schemas 200 --generations 2000
    python -m benchmarks.structured --only speed --users 100 --bound 10 --seconds 30
    python -m benchmarks.structured --only masks                                # no model: llguidance and xgrammar, if installed
    python -m benchmarks.structured --only speed --shape qwen2.5-1.5b           # random weights of that shape (a GPU)

Does: generate at temperature 1 over schemas of our own and validate each answer; tokens per second of bound answers against free
text, alone and among other users; time per mask and per grammar. Does not: need a network. Prints tables for docs/structured.md.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.schemas import Case, make_cases, without_lengths
from benchmarks.structured_masks import HEAD, measure_ours, measure_xgrammar
from benchmarks.structured_speed import measure_speed
from benchmarks.structured_validity import show, validate
from benchmarks.synthetic_tokenizer import synthetic_tokenizer
from benchmarks.workload import SHAPES, write_config
from tonle.config.engine import EngineConfig
from tonle.engine.grammar.vocabulary import make_vocabulary
from tonle.engine.inference_engine import InferenceEngine
from tonle.engine.text import load_text
from tonle.models.source import ModelSource, resolve

PARTS = ("masks", "speed", "validity")


def main() -> int:
    args = _arguments()
    cases, good = make_cases(args.schemas, args.seed), True
    parts = [args.only] if args.only else list(PARTS)
    if "masks" in parts:
        _masks(cases, args)
        parts.remove("masks")
    if parts:
        with tempfile.TemporaryDirectory() as folder:
            source, config = _model(args, Path(folder))
            if "speed" in parts:
                if args.no_lengths:
                    cases = [replace(case, schema=without_lengths(case.schema)) for case in cases]
                crowd = {"users": args.users, "bound": args.bound, "seconds": args.seconds}
                asyncio.run(measure_speed(source, config, cases, **crowd))
            if "validity" in parts:
                with InferenceEngine(source.path, None, config) as engine:
                    good = _validate(engine, cases, args)
    return 0 if good else 1


def _validate(engine: InferenceEngine, cases: Sequence[Case], args: argparse.Namespace) -> bool:
    print(f"## Validity: {args.generations} answers over {len(cases)} schemas at temperature 1", flush=True)
    log = partial(print, file=sys.stderr, flush=True)
    alone = min(args.alone, args.generations)
    return show(asyncio.run(validate(engine, cases, args.generations, num_alone=alone, batch=args.users, log=log)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a path or hub name; the default model")
    parser.add_argument("--shape", default=None, choices=sorted(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json for --shape; one is made up if left out")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--generations", type=int, default=2000)
    parser.add_argument("--alone", type=int, default=200, help="of the generations: one after the other")
    parser.add_argument("--no-lengths", action="store_true", help="texts of any length: their masks are quicker")
    parser.add_argument("--users", type=int, default=32, help="at once")
    parser.add_argument("--bound", type=int, default=None, help="of the users; a tenth")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of speed")
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()
    args.bound = max(1, args.users // 10) if args.bound is None else args.bound
    return args


def _model(args: argparse.Namespace, folder: Path) -> tuple[ModelSource, EngineConfig]:
    config = EngineConfig(max_batch_size=max(args.users, 8), max_sequence_length=1024)
    if args.shape is None:
        return resolve(args.model), config
    shape = SHAPES[args.shape]
    path = write_config(args.shape, folder)
    if args.tokenizer is not None:
        shutil.copyfile(args.tokenizer, path / "tokenizer.json")
    else:
        synthetic_tokenizer(shape["vocab_size"], shape["eos_token_id"]).save(str(path / "tokenizer.json"))
    return ModelSource("folder", path, args.shape), replace(config, load_format="random")


def _masks(cases: Sequence[Case], args: argparse.Namespace) -> None:
    text = load_text(resolve(args.model))
    vocabulary = make_vocabulary(text, text.vocab_size, text.eos_ids)
    print(f"## Host: {len(cases)} schemas, {text.vocab_size} tokens\n\n{HEAD}", flush=True)
    costs, answers = measure_ours(cases, text, vocabulary)
    print(costs.row(), flush=True)
    try:
        print(measure_xgrammar(cases, text, text.vocab_size, sorted(text.eos_ids), answers).row(), flush=True)
    except ImportError:
        print("xgrammar is not installed: no comparison")


if __name__ == "__main__":
    sys.exit(main())
