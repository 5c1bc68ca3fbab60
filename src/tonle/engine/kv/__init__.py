"""Who holds which KV block. Does: count references, remember equal prefixes, evict. Does not: hold tensors, know of requests."""
