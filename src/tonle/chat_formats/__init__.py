"""How models write tool calls and thoughts into their text, and how to read them again.

Does: formats by name (Hermes, Llama 3, Mistral, …): which one a chat template speaks, the grammar of its calls, a parser that
reads an answer while it grows. Does not: know tokens, HTTP or the engine; texts in, parts out.
"""
