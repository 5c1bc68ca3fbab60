"""Which backend gets a request.

Does: alias, experiment, length, prefix and load, in that order (`router.py`). Does not: send.
"""
