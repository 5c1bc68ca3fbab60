"""API keys: what they are and where they are kept.

Does: make, hash, store, find, revoke. Does not: decide what a request may do with one (`auth.py`, `limits/`).
"""
