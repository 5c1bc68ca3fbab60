"""LoRA adapters: low-rank additions to a model's matrices, read from PEFT folders. Does not: apply them (each backend does)."""

from tonle.models.adapters.adapter import MAX_RANK, MODULES, Adapter, AdapterPart, HeldAdapter

__all__ = ["MAX_RANK", "MODULES", "Adapter", "AdapterPart", "HeldAdapter"]
