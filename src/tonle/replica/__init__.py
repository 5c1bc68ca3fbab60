"""One engine behind an OpenAI-compatible HTTP server.

Does: act as a backend of the gateway's pipeline in the same process: translate requests for the engine's front, return
answers whole or as events, report health and metrics. Does not: schedule, batch or tokenize; the front and the engine do.
Runs: in the serving process, on its event loop; torch-free.

    serve.serve(front, settings, ...)   run until told to stop
"""
