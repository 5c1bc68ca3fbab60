"""Requests that are not chats: embeddings, rankings, transcriptions, speech, images.

Does: say of each kind how a request is made, how its answer is read, which numbers it has and which settings it takes.
Does not: send or time anything: loads, warm-up, clients and reports are those of chats.
"""
