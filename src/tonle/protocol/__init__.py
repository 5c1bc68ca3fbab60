"""What goes over the wire: OpenAI's bodies, server-sent events, and the one mapping from errors to HTTP.

Does: declare, parse and explain bodies. Does not: know about sockets, engines or torch. Runs: anywhere; no I/O.

    openai     bodies of Tonle's requests and replies
    parse      bytes of a request to one of those types, with clear errors
    fields     request fields that Tonle ignores, removes or refuses
    known      all field names of OpenAI-compatible servers, to find misspelled ones
    errors     exceptions to HTTP status and OpenAI's error body
    sse        server-sent events as bytes: frame and split
    replies    what any OpenAI-compatible server replies: chunks, whole replies, model lists
    answers    chunks assembled into a whole `Answer` as they pass through
"""
