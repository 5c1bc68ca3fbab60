"""What operators watch: metrics with the names that dashboards and routers know, and log lines.

Does: declare, collect, render, format. Does not: import the engine or HTTP; it reads the engine's state through `EngineView`.
Runs: in the serving process, on its event loop; metrics are rendered when scraped.
"""
