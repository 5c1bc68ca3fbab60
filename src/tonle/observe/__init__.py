"""What a server remembers of its requests and its load: latest requests, figures per second and minute, usage, targets, alerts.

Does: keep and summarize what the gateway tells it. Does not: take part in a request, answer HTTP or touch the engine.
"""
