"""One engine behind an OpenAI-compatible HTTP server.

Does: translate wire requests for the engine's front, deliver answers whole or as events, answer for health and metrics,
as a backend of the gateway's pipeline in the same process. Does not: schedule, batch or tokenize; it asks the front.
Runs: in the serving process, on its event loop; torch-free.

    serve.serve(front, settings, ...)   run until told to stop
"""
