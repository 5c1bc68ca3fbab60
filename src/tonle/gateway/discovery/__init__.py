"""Backends that come and go: sources that find them, and the reconciling of what is wanted with what is there.

Does: watch a file, a Kubernetes Service or what admins added (`Source`); add, change and drain backends while the gateway runs.
Does not: choose between backends (`routing/`), probe or send (`backends/`).
"""
