"""Backends: servers reached over HTTP, or an application in this process.

Does: carry a request to a backend; know its health, its models and how busy it is. Does not: choose
between backends (`routing/`).
"""
