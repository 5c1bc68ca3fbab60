"""Parts of the dashboard's server, without a server."""
