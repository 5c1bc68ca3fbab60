"""Checkpoints whose matrices are stored in few bits: AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes, MXFP4.

Does: find out from `quantization_config` in which form a folder's matrices are (`read_form`), and show its tensors as if each
matrix were one tensor `NAME.weight` (`QuantizedTensors`), given as `Quantized`. One file for each form says how its tensors
are laid out. Does not: compute with them, or quantize (`models/quantize.py`). Matrices that a checkpoint left as they were
(`modules_to_not_convert`, `ignore`) have no tensors of the form beside them, and are read as usual.
"""

from tonle.models.load.quantized.form import Form, QuantizedTensors
from tonle.models.load.quantized.read_form import quantization_settings, read_form

__all__ = ["Form", "QuantizedTensors", "quantization_settings", "read_form"]
