"""The front door: keys, limits, audit, cache and routing in front of engines, ours or anybody's.

Does: admit, charge, record, replay, choose a backend, send, watch the stream. Does not: load torch or a model; know
how an answer is computed. Runs: in one process, on its event loop; files and databases on threads.

`pipeline.py` is the only file that knows the order of the stages, and stages do not import each other.
"""
