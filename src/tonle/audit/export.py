"""Records for other programs: JSON lines, a CSV table, or Parquet.

Does: write. Does not: choose which records (`index.py`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from tonle.audit.record_file import escape_controls, read_record
from tonle.errors import ConfigError

Format = Literal["jsonl", "csv", "parquet"]

# Columns of a table, and where in a record they come from.
COLUMNS: dict[str, tuple[str, ...]] = {
    "time": ("time",), "id": ("id",), "request_id": ("request_id",), "response_id": ("response_id",),
    "endpoint": ("endpoint",), "status": ("status",), "http_status": ("http_status",), "key_id": ("key_id",),
    "client": ("client",), "model": ("model",), "adapter": ("adapter",),
    "adapter_digest": ("adapter_digest",), "system_prompt": ("system_prompt",),
    "user_input": ("user_input",), "output": ("output",), "finish_reason": ("finish_reason",),
    "prompt_tokens": ("usage", "prompt_tokens"), "completion_tokens": ("usage", "completion_tokens"),
    "total_tokens": ("usage", "total_tokens"), "queue_ms": ("latency_ms", "queue"), "prefill_ms": ("latency_ms", "prefill"),
    "decode_ms": ("latency_ms", "decode"), "ttft_ms": ("latency_ms", "ttft"), "total_ms": ("latency_ms", "total"),
    "sampling": ("sampling",), "cache": ("cache",), "route": ("route",), "experiment": ("experiment",),
    "error": ("error",), "hash": ("chain", "hash"), "chain_id": ("chain_id",), "previous_id": ("previous_id",),
}  # fmt: skip
_INTEGERS = ("http_status", "prompt_tokens", "completion_tokens", "total_tokens")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # that a terminal would obey
_PARQUET_ROWS = 5000  # per row group


def read_records(files: Iterable[Path], skipped: list[str]) -> Iterator[dict[str, Any]]:
    """Files that hold no record are passed over; `skipped` gets a line for each."""
    for file in files:
        try:
            yield read_record(file)
        except (OSError, ValueError) as error:
            reason = "it is gone" if isinstance(error, FileNotFoundError) else str(error)
            skipped.append(f"{file.parent.name}/{file.name}: {reason}")


def write_jsonl(records: Iterable[dict[str, Any]], out: IO[bytes]) -> int:
    """Whole records, one on each line."""
    num_records = 0
    for num_records, record in enumerate(records, 1):  # noqa: B007 - the last number is the count
        out.write(escape_controls(msgspec.json.encode(record)) + b"\n")
    return num_records


def write_csv(records: Iterable[dict[str, Any]], out: IO[str]) -> int:
    """One row each, with `COLUMNS`. A value that a spreadsheet would take for a formula gets a quote before it, and control
    characters are written out (\\x1b)."""
    table = csv.writer(out)
    table.writerow(COLUMNS)
    num_records = 0
    for num_records, record in enumerate(records, 1):  # noqa: B007
        table.writerow([_tame(value) for value in row(record).values()])
    return num_records


def write_parquet(records: Iterable[dict[str, Any]], path: Path) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("Parquet needs pyarrow; install tonle[audit], or export jsonl or csv") from None
    types = {
        name: pa.int64() if name in _INTEGERS else pa.float64() if name.endswith("_ms") else pa.string()
        for name in COLUMNS
    }
    schema = pa.schema(list(types.items()))
    num_records = 0
    with pq.ParquetWriter(path, schema) as writer:
        rows: list[dict[str, Any]] = []
        for record in records:
            rows.append({name: _typed(name, value) for name, value in row(record).items()})
            num_records += 1
            if len(rows) == _PARQUET_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return num_records


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A record as one flat row; what is not flat becomes JSON."""
    values = {}
    for name, path in COLUMNS.items():
        value: Any = record
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        values[name] = msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value
    return values


def _typed(name: str, value: Any) -> Any:
    if value is None or name.endswith("_ms") or name in _INTEGERS:
        return value if isinstance(value, int | float) else None
    return str(value)


def _tame(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
