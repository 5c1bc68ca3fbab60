"""Which backend gets a request.

Does: find the model behind a name (`router.py`), then apply the policies in order (`policies.py`). Does not: send.
"""
