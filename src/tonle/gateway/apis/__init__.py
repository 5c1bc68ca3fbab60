"""APIs other than OpenAI's chat completions, as translations into it and back.

Does: read a body of the other API into the body of a path that backends have, and write the reply in the other API's
shape, whole or streamed. Each is a `Call` (`gateway/call.py`), so keys, limits, cache, records and deadlines are those of
the pipeline. Does not: answer, or know backends. Runs in the gateway's process, and in that of `tonle serve`.
"""
