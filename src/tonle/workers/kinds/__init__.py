"""The kinds that come with Tonle. Each is imported only in the worker process that runs it."""
