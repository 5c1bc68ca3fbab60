"""`RenderedFile`: one file that `tonle deploy render` writes: YAML documents, or text.

Does: turn documents into YAML that people read and `diff`. Does not: know what is in them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import yaml

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedFile:
    name: str  # relative to the folder it is written to
    documents: list[Document] = field(default_factory=list)
    comment: str = ""  # at the top of the file
    body: str = ""  # of a file that is not YAML documents

    @property
    def text(self) -> str:
        head = "".join(f"# {line}\n" for line in self.comment.splitlines())
        return head + (self.body or "---\n".join(yaml_text(document) for document in self.documents))


def json_file(name: str, document: Document) -> RenderedFile:
    return RenderedFile(name, body=json.dumps(document, indent=2, ensure_ascii=False) + "\n")


class _Dumper(yaml.SafeDumper):
    """No anchors: the same label block in two places is written twice, as people would."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)  # list items are indented, as kubectl's own examples are


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(document: Document) -> str:
    """Keys in the order they were made; text of several lines stands as a block."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text
