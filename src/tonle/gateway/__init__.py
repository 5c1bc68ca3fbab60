"""The gateway: keys, limits, audit, cache and routing in front of backends. They are other servers (`tonle gateway`), or the
engine of this process (`tonle serve`).

Does: admit, charge, record, answer from the cache, choose a backend, send, relay the answer. Does not: load torch or a
model; know how an answer is computed. Runs: in one process, on its event loop; files and databases on threads.

`pipeline.py` is the only file that knows the order of the stages. `stage_results.py` has what each of them returns. Stages do
not import each other.
"""
