"""What operators watch: metrics in the names dashboards and routers know, and log lines.

Does: declare, collect, render, format. Does not: know the engine or HTTP; it reads the engine through `EngineView`.
Runs: in the serving process, on its event loop; metrics are rendered when scraped.
"""
