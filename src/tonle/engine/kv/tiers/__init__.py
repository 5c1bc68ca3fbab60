"""Tiers of keys and values below the device: host memory, disk, a store that engines share.

Does: keep blocks that were evicted from the device, and bring them back. Does not: know sequences; the scheduler meets it as one
more source of prefixes (`kv/incoming.py`).
"""
