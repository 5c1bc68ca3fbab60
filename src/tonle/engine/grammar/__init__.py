"""Structured output: answers that are what a grammar says.

Does: turn what a caller asks for (a JSON schema, a regular expression, …) into a grammar, compile it beside the loop, say which
tokens may come next and which must. Does not: sample, or know a tensor. llguidance does the parsing.
"""
