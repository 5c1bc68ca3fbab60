"""The gateway: keys, limits, audit, cache and routing in front of engines, Tonle's or any other.

Does: admit, charge, record, replay, choose a backend, send, watch the stream. Does not: load torch or a model; know
how an answer is computed. Runs: in one process, on its event loop; files and databases on threads.

`pipeline.py` is the only file that knows the order of the stages; `stage_results.py` has what each of them returns, and
stages do not import each other.
"""
