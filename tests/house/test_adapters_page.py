"""The Python of docs/adapters.md runs as it is printed, and its table of sizes is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tonle.models.adapters.read_adapter import matrix_shapes
from tonle.models.read_spec import from_hf_config
from tonle.models.source import ModelSource

TEXT = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SIZES = {
    "Qwen2.5-1.5B": ("Qwen2ForCausalLM", 1536, 8960, 28, 12, 2),
    "Llama-3.2-3B": ("LlamaForCausalLM", 3072, 8192, 28, 24, 8),
}


@pytest.mark.model
def test_an_adapter_is_made_and_used(default_model: ModelSource, tmp_path: Path) -> None:
    program = "\n".join(BLOCKS) + "\nprint(repr(texts))"
    program = "texts = []\n" + program.replace("    print(llm.generate(", "    texts.append(llm.generate(")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    adapters, texts = map(eval, done.stdout.splitlines()[-2:])
    assert texts[0] != texts[1]
    assert adapters["demo"] == adapters["another"] and adapters["demo"][0] == 8


def test_the_sizes_are_right() -> None:
    rows = re.findall(r"\| (\S+) \| (\d+) \| ([\d.]+) million \| (\d+) MB \| (\d+) MB \| ([\d.]+) GB \|", TEXT)
    assert len(rows) == 3
    for model, rank, millions, slot_mb, host_mb, slots_gb in rows:
        architecture, hidden, intermediate, layers, heads, kv_heads = SIZES[model]
        spec = from_hf_config({
            "architectures": [architecture], "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 9, "max_position_embeddings": 99,
        })  # fmt: skip
        numbers = int(rank) * sum(rows + columns for rows, columns in matrix_shapes(spec).values())
        assert f"{numbers / 1e6:.1f}" == millions
        assert (round(numbers * 2e-6), round(numbers * 4e-6)) == (int(slot_mb), int(host_mb))
        assert f"{8 * numbers * 2e-9:.2f}" == slots_gb
