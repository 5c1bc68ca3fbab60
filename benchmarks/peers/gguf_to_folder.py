"""Write a GGUF file's weights as a Hugging Face folder: float32 safetensors, config and tokenizer.

    python gguf_to_folder.py MODEL.gguf FOLDER

Runs in a peer's environment: needs torch, transformers and gguf, and nothing of Tonle.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, folder: Path) -> None:
    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
