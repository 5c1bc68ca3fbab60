"""The dashboard's server: login, who may see what, the stream, and attacks on it."""
