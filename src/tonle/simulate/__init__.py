"""What a server would do, without a device: the engine's own scheduler and the gateway's own routing in virtual time.

Does: run traces through replicas whose steps take what a `StepTimes` says; fit one from measured steps (`profile.py`).
Does not: compute tokens, import torch, or have a scheduler of its own.
"""
