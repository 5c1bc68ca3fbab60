"""Servers to compare with: how each is started here, the model files it needs, and the process while it runs.

Does: find installed peers, make their model files once, start, wait, watch memory, stop.
Does not: install anything (README.md says how) or measure speed (`tonle.bench` does).
"""
