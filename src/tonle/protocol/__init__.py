"""What goes over the wire: OpenAI's bodies, server-sent events, and the one mapping from errors to HTTP.

Does: declare, parse and explain bodies. Does not: know of sockets, engines or torch. Runs: anywhere; pure functions.
"""
