"""Who answers: servers reached over HTTP, or an application in this process.

Does: carry a request to a backend, know whether it is well, which models it has and how busy it is. Does not: choose
between backends (`routing/`).
"""
