"""The docs page: one self-contained HTML document, no scripts, nothing loaded from elsewhere.

Does: lay out the catalog. Does not: hold any text about particular fields; that is in the wire types.
"""

from __future__ import annotations

import html
import json
from typing import Any

from tonle import __version__
from tonle.replica.api_catalog import ENTRIES, schemas
from tonle.replica.catalog_entry import CatalogEntry

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; font-size: 1.1rem; border-top: 1px solid var(--line); padding-top: 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: var(--soft); padding: .75rem; overflow-x: auto; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
.scroll { overflow-x: auto; }
"""

_HEADERS = (
    ("X-Request-Id", "Yours, if you send one; it is in the log and in every reply."),
    ("X-Tonle-Strict: 1", "Make a field that has no effect an error instead of a warning."),
    (
        "X-Tonle-Warnings",
        "In replies: how many fields had no effect, and which. The body says why, in <code>warnings</code>.",
    ),
    (
        "X-Tonle-Max-Tokens",
        "In generated replies: how many tokens the answer was allowed, also where none were asked for.",
    ),
    (
        "X-Tonle-Adapter",
        "In answers of a LoRA adapter: its name and the SHA-256 of its content, <code>NAME@sha256:DIGEST</code>.",
    ),
    ("X-Session-Id", "Yours: requests with the same one stand in the audit trail as one chain."),
    (
        "X-Tonle-Chain",
        "In replies of a server with an audit trail: the chain of requests in it that this one belongs to.",
    ),
    ("X-Process-Time", "In replies that are not streams: seconds this server spent."),
    ("Retry-After", "With 429 and 503: seconds to wait before trying again."),
)


def docs_page(model: str, base_url: str) -> str:
    base_url = html.escape(base_url)
    sections = "\n".join(_section(entry, base_url) for entry in ENTRIES)
    headers = "\n".join(f"<tr><td><code>{name}</code></td><td>{text}</td></tr>" for name, text in _HEADERS)
    shown = {kind.__name__ for entry in ENTRIES for kind in (entry.request, entry.reply) if kind is not None}
    types = "\n".join(_fields(name, name) for name in schemas() if name not in shown)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tonle API</title><style>{_STYLE}</style></head><body>
<h1>Tonle API</h1>
<p>Serving <code>{html.escape(model)}</code>, version {__version__}. Any OpenAI client works with the base URL
<code>{base_url}/v1</code>. Machine-readable: <a href="/openapi.json">/openapi.json</a>.</p>
{sections}
<h2>Types</h2>
{types}
<h2>Headers</h2>
<div class="scroll"><table>{headers}</table></div>
</body></html>
"""


def _section(entry: CatalogEntry, base_url: str) -> str:
    parts = [f"<h2><code>{entry.method} {html.escape(entry.path)}</code></h2>", f"<p>{html.escape(entry.summary)}</p>"]
    url = base_url + html.escape(entry.path)
    if entry.example is None:
        parts.append(f"<pre>curl {url}</pre>")
    else:
        body = html.escape(json.dumps(entry.example), quote=False)
        parts.append(f"<pre>curl {url} -H 'Content-Type: application/json' \\\n  -d '{body}'</pre>")
    if entry.request is not None:
        parts.append(_fields("Fields", entry.request.__name__))
    if entry.reply is not None:
        parts.append(_fields("Reply", entry.reply.__name__))
    return "\n".join(parts)


def _fields(title: str, name: str) -> str:
    schema = schemas()[name]
    required = set(schema.get("required", ())) if title == "Fields" else set()
    rows = []
    for field, shape in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        note = html.escape(shape.get("description", ""))
        mark = " (required)" if field in required else ""
        rows.append(f"<tr><td><code>{field}</code>{mark}</td><td>{html.escape(_type(shape))}</td><td>{note}</td></tr>")
    heading = f"<tr><th>{title}</th><th>Type</th><th></th></tr>"
    return f'<div class="scroll"><table>{heading}{"".join(rows)}</table></div>'


def _type(shape: dict[str, Any]) -> str:
    """A JSON schema in a few words: `string or list of string`."""
    if "$ref" in shape:
        return str(shape["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in shape:
        return " or ".join(word for word in map(_type, shape["anyOf"]) if word != "null")
    if "const" in shape or "enum" in shape:
        return " or ".join(json.dumps(value) for value in shape.get("enum", [shape.get("const")]))
    if shape.get("type") == "array":
        return f"list of {_type(shape.get('items', {})) or 'anything'}"
    return str(shape.get("type", "anything"))
