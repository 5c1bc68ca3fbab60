"""Encoders (BERT, RoBERTa and XLM-R, ModernBERT): one forward pass, and what lies beside their weights.

folder.py     finds a model's files; pooling, prompts and lengths as sentence-transformers writes them. No torch
spec.py       config.json as numbers, and the table of what differs between families. No torch
text.py       texts into token ids, in the process that serves HTTP. No torch
packed.py     several inputs as one run of tokens, without padding
weights.py    safetensors into the tensors of a spec
encoder.py    the forward pass
onnx_encoder.py  the same by onnxruntime, of a folder with model.onnx
pooling.py    states of tokens into one vector
head.py       states of tokens into the score of a cross-encoder
open_encoder.py  all of it for a folder and a device
"""
