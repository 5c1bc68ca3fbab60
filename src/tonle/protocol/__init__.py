"""What goes over the wire: OpenAI's bodies, server-sent events, and the one mapping from errors to HTTP.

Does: declare, parse and explain bodies. Does not: know of sockets, engines or torch. Runs: anywhere; no I/O.

    openai     bodies that callers send to Tonle, and that Tonle replies with
    parse      bytes of a request to one of those types, with clear errors
    fields     request fields Tonle does not act on: without effect, removed, or refused
    known      all field names of OpenAI-compatible servers, to find misspelled ones
    errors     exceptions to HTTP status and OpenAI's error body
    sse        server-sent events as bytes: frame and split
    replies    what any OpenAI-compatible server replies: chunks, whole replies, model lists
    answers    chunks put together to a whole `Answer` while they pass through
"""
