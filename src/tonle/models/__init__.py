"""Pure math: what a model is, its weights, one forward step over a paged KV cache.

Does: specs, one decoder that families declare their differences to, attention, loading. Does not: know of requests,
schedules, settings or HTTP. Runs: in the engine's process or thread. `source.py`, `default_model.py`, `gguf_file.py`,
`spec.py` and `read_spec.py` need no torch, so that a process which only tokenizes may use them.
"""
