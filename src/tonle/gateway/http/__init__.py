"""HTTP/1.1 for a proxy: a server and a client over asyncio protocols and llhttp (httptools).

Does: carry requests, answers and streams with one write per read. Does not: know of JSON, models or keys.
Why not uvicorn and httpx: an answer costs half of uvicorn's CPU and a small fraction of httpx' (`benchmarks/http_choice.py`).
"""
