"""The dashboard: a page at /dashboard, its login, and the data that it shows.

Does: serve files, sessions, a live stream and JSON. Does not: remember anything (`tonle.observe`) or change anything: the page
asks the paths of `/admin` and `/v1` for that, as any caller does.
"""
