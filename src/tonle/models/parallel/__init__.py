"""One model on several devices: which part each of them holds, and how they add up what they computed.

Each device has a process of its own, a rank. Does: cut specs, weights and adapters (`shard.py`), load a part (`load_shard.py`),
sums and concatenations over the ranks (`group.py`). Does not: start processes or hand out steps (`engine/ranks/`).
"""
