"""Write a GGUF file's weights as a Hugging Face folder: float32 safetensors, config and tokenizer.

    python gguf_to_folder.py MODEL.gguf FOLDER

Runs in a peer's environment: needs torch, transformers, accelerate and gguf, and nothing of Tonle.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


def main(source: Path, folder: Path) -> None:
    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    if getattr(model, "hf_quantizer", None) is not None:
        # The weights were unpacked, but from 5.20 on transformers keeps the mark of a GGUF model, and saves none that has it.
        model.hf_quantizer.remove_quantization_config(model)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    backend = tokenizer.backend_tokenizer
    # The conversion puts a beginning-of-text token before every prompt, whatever the file says. The default model's
    # says no: without this the same text would be one token longer here than for llama-server and Tonle.
    backend.post_processor = ByteLevel(trim_offsets=False)
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=backend.id_to_token(model.config.eos_token_id))
    plain.chat_template = tokenizer.chat_template
    plain.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
