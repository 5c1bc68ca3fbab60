"""Keys and values from one engine to another: prefill on one, decode on the other (docs/scale.md).

Does: lease blocks, serve them over TCP, fetch them, check that both ends mean the same model and the same prompt. Does not:
decide who loads (`engine/schedule/loading.py`) or write to the cache (`engine/kv/incoming.py`).
"""
