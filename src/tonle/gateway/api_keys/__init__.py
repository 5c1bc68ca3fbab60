"""API keys: what they are, where they are kept, who holds which.

Does: make, hash, store, find, revoke. Does not: decide what a request may do with one (`auth.py`, `limits.py`).
"""
