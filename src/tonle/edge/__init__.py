"""The HTTP edge: one server, one client, one exchange, for replica, gateway and benchmark alike.

Does: sockets, HTTP/1.1 framing, limits, timeouts, draining, keep-alive. Does not: route or interpret requests. Torch-free.

    listening.bind, run        an address, and the event loop to run on
    server.HttpServer          callers' connections; one `Exchange` per request
    client.HttpClient          connections to one server; answers go to a `Sink`
    buffered_reply.fetch       a whole answer
    streamed_reply.stream      an answer to be read as it arrives
"""
