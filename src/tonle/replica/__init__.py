"""One engine behind an OpenAI-compatible HTTP server.

Does: translate wire requests for the engine's front, deliver answers whole or as events, answer for health and metrics.
Does not: schedule, batch or tokenize; it asks the front. Runs: in the serving process, on its event loop; torch-free.

    serve.serve(front, ...)        run until told to stop
    app.build_app(front, options)  the ASGI application alone
"""
