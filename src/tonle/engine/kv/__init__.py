"""KV blocks: who holds which (`block_pool.py`), and their bytes on the way in or out. Does not: know of the scheduler."""
