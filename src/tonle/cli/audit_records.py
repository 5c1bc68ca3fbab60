"""The part of `tonle audit` that reads records: query, show, export, replay, reindex."""

from __future__ import annotations

import asyncio
import enum
import re
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonle.cli import screen
from tonle.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from tonle.audit.index import Query, Row
    from tonle.audit.replay_records import Send
    from tonle.cli.remote_server import RemoteServer

SOME_DIFFER = 1
_TABLE_WIDTH = 1000

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The audit directory.", show_default=False)]
SinceOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="From this time on, in UTC: 2025-01-31 or 2025-01-31T09:30.")
]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="Up to this time.")]
KeyIdOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY_ID", help="Only requests made with the key of this id.")
]
ModelOption = Annotated[str | None, typer.Option(metavar="MODEL", help="Only requests for this model.")]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADAPTER",
        help="Only requests for this LoRA adapter: its name, or sha256:DIGEST of its content, of which the first 8 digits "
        "or more will do.",
    ),
]
StatusOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only this status: ok, cached, refused, failed, cancelled or interrupted."),
]
ChainOption = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Only the requests that go on from each other, such as an agent's loop of tool calls: the id of any of them.",
    ),
]
TextOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Only records whose prompt or answer contains this.")
]


class FormatName(enum.StrEnum):
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    for command in (query, show, export, replay, reindex):
        app.command(command.__name__)(command)


def query(
    directory: DirectoryArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    key: KeyIdOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    status: StatusOption = None,
    chain: ChainOption = None,
    text: TextOption = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most this many records.")] = 100,
    newest: Annotated[bool, typer.Option("--newest", metavar="", help="Newest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object per line.")] = False,
) -> None:
    """List records by time, key, model, adapter, status, chain and text.

    [dim]Example:[/dim]  tonle audit query audit --since 2025-01-31 --status failed --text សួស្តី
    """
    import msgspec

    from tonle.audit.index import Index
    from tonle.audit.record_file import escape_controls

    wanted = _query(since, until, key, model, status, text, limit, adapter=adapter, chain=chain, newest=newest)
    with Index(directory) as index:
        rows = list(index.find(wanted))
    if as_json:
        for row in rows:
            typer.echo(escape_controls(msgspec.json.encode(row)).decode())
    else:
        _show_table(rows)


def show(
    directory: DirectoryArgument,
    record_id: Annotated[str, typer.Argument(metavar="ID", help="Short id, request id, response id or file.")],
) -> None:
    """Print one record as it is on disk, with control characters escaped."""
    from tonle.audit.index import Index
    from tonle.audit.record_file import MAX_RECORD_BYTES, escape_controls
    from tonle.audit.regular_file import read_regular

    with Index(directory) as index:
        path = index.locate(record_id)
    try:
        content = read_regular(path, MAX_RECORD_BYTES)
    except (OSError, ValueError) as error:
        raise NotFound(f"{path} cannot be shown: {error}; see `tonle audit verify`") from None
    typer.echo(escape_controls(content).decode(errors="backslashreplace"), nl=False)


def export(
    directory: DirectoryArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")
    ] = None,
    form: Annotated[
        FormatName, typer.Option("--format", metavar="NAME", help="jsonl (whole records), csv or parquet (tables).")
    ] = FormatName.jsonl,
    since: SinceOption = None,
    until: UntilOption = None,
    key: KeyIdOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    status: StatusOption = None,
    chain: ChainOption = None,
    text: TextOption = None,
) -> None:
    """Write records as JSON lines, CSV or Parquet.

    [dim]Example:[/dim]  tonle audit export audit --format csv -o january.csv --since 2025-01-01 --until 2025-02-01
    """
    from tonle.audit import export as writers

    wanted = _query(since, until, key, model, status, text, None, adapter=adapter, chain=chain)
    skipped: list[str] = []
    records = writers.read_records(_files(directory, wanted), skipped)
    try:
        num_records = _write(records, form, output)
    except OSError as error:
        if output is None:
            raise
        raise InvalidRequest(f"cannot write {output}: {error.strerror or error}") from None
    _tell_skipped(skipped)
    screen.stderr().print(f"exported {screen.count(num_records, 'record')}")


def _write(records: Iterator[dict[str, Any]], form: FormatName, output: Path | None) -> int:
    """The number of records written. `output` None: to standard output."""
    from tonle.audit import export as writers

    if form is FormatName.parquet:
        if output is None:
            raise InvalidRequest("Parquet cannot be written to standard output; give --output FILE")
        return writers.write_parquet(records, output)
    if form is FormatName.csv:
        if output is None:
            return writers.write_csv(records, sys.stdout)
        with output.open("w", encoding="utf-8", newline="") as table:
            return writers.write_csv(records, table)
    if output is None:
        return writers.write_jsonl(records, sys.stdout.buffer)
    with output.open("wb") as lines:
        return writers.write_jsonl(records, lines)


def replay(
    directory: DirectoryArgument,
    url: Annotated[
        str, typer.Option(metavar="URL", help="The server to ask, with or without /v1. Proxies are not used.")
    ],
    record_id: Annotated[str | None, typer.Option("--id", metavar="ID", help="Only this record.")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Bearer token.", envvar="OPENAI_API_KEY")] = None,
    as_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Ask for this model instead of the recorded one.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", metavar="", help="Include requests whose answers may differ by chance (sampled without a seed)."
        ),
    ] = False,
    since: SinceOption = None,
    until: UntilOption = None,
    key: KeyIdOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    chain: ChainOption = None,
    text: TextOption = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most this many records.")] = 100,
    timeout: Annotated[float, typer.Option(metavar="N", help="Seconds to wait for one answer.")] = 600.0,
) -> None:
    """Send recorded requests again, and report whether the answers are the same and where they first differ.

    [dim]Example:[/dim]  tonle audit replay audit --url http://127.0.0.1:8000 --since 2025-01-31

    Exit status: 0 all the same, 1 some differ or failed.
    """
    from tonle.audit import replay_records as player
    from tonle.audit.export import read_records
    from tonle.audit.index import Index
    from tonle.cli.remote_server import RemoteServer

    if record_id is None:
        files = list(
            _files(directory, _query(since, until, key, model, None, text, limit, adapter=adapter, chain=chain))
        )
    else:
        with Index(directory) as index:
            files = [index.locate(record_id)]
    server = RemoteServer(url, api_key=api_key)
    verdicts: dict[str, int] = {}
    skipped: list[str] = []
    unknown: dict[str | None, None] = {}  # in order: the recorded models behind names that this server does not have
    with asyncio.Runner() as runner:
        send = _sender(runner, server, timeout)
        try:
            for outcome in player.replay(read_records(files, skipped), send, model=as_model, everything=everything):
                verdicts[outcome.verdict] = verdicts.get(outcome.verdict, 0) + 1
                if outcome.unknown_model:
                    unknown[outcome.answered_by] = None
                typer.echo(screen.one_line(str(outcome)))
        finally:
            server.close()
            _tell_skipped(skipped)
            counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
            if counts or not files:
                screen.stderr().print(counts or "no records")
    if unknown:
        _hint_as_model([name for name in unknown if name])
    if verdicts.keys() & {"different", "failed"}:
        raise typer.Exit(SOME_DIFFER)


def _tell_skipped(skipped: list[str]) -> None:
    from rich.text import Text

    for line in skipped:
        screen.stderr().print(Text(f"passed over: {screen.one_line(line)}"))


def _sender(runner: asyncio.Runner, server: RemoteServer, timeout_s: float) -> Send:
    from tonle.audit.replay_records import ServerReply

    def send(path: str, body: dict[str, Any]) -> ServerReply:
        reply = runner.run(server.post(path, body, timeout_s=timeout_s))
        if reply.status == HTTPStatus.UNAUTHORIZED:  # so will be all others
            raise server.refusal(reply, reply.body)
        return ServerReply(reply.status, reply.content_type, reply.body)

    return send


def _hint_as_model(behind: list[str]) -> None:
    from rich.markup import escape

    name = behind[0] if len(behind) == 1 else "NAME"
    screen.stderr().print(
        "This server does not know every recorded model name; a name may be an alias of a gateway. "
        f"Ask for another with --as-model {escape(screen.harmless(name))}."
    )


def reindex(directory: DirectoryArgument) -> None:
    """Rebuild the search index from the records. The index can be deleted at any time."""
    from tonle.audit.index import Index

    with Index(directory, rebuild=True) as index:
        screen.stderr().print(f"indexed {screen.count(index.num_added, 'record')}")


def _query(
    since: str | None,
    until: str | None,
    key: str | None,
    model: str | None,
    status: str | None,
    text: str | None,
    limit: int | None,
    *,
    adapter: str | None = None,
    chain: str | None = None,
    newest: bool = False,
) -> Query:
    from tonle.audit.index import Query, query_time
    from tonle.audit.record import STATUSES

    if status is not None and status not in STATUSES:
        raise InvalidRequest(f"status must be one of {', '.join(STATUSES)}, not {status!r}", param="status")
    return Query(
        since=query_time(since), until=query_time(until), key_id=key, model=model, adapter=adapter, status=status,
        chain=chain, text=text, limit=limit, newest_first=newest,
    )  # fmt: skip


def _files(directory: Path, wanted: Query) -> Iterator[Path]:
    from tonle.audit.index import Index

    with Index(directory) as index:
        rows = list(index.find(wanted))
    for row in rows:
        yield directory / row.day / row.file


def _show_table(rows: list[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    # What may be long comes last, so that a narrow terminal wraps that and not the rest.
    for column in ("Time", "Id", "Status", "Tokens", "ms", "Key", "Model"):
        table.add_column(column, justify="right" if column in ("Tokens", "ms") else "left", no_wrap=True)
    for row in rows:
        cells: list[Any] = [
            _to_seconds(row.time or ""), row.id or "", row.status or "",
            f"{row.prompt_tokens if row.prompt_tokens is not None else '?'}+"
            f"{row.completion_tokens if row.completion_tokens is not None else '?'}",
            f"{row.total_ms:.0f}" if row.total_ms is not None else "",
            row.key_id or "", row.model or "",
        ]  # fmt: skip
        table.add_row(*[Text(screen.harmless(cell).replace("\n", " ")) for cell in cells])
    out = screen.stdout()
    out.width = max(out.width, _TABLE_WIDTH)  # one record, one line, also for grep
    out.print(table)
    screen.stderr().print(screen.count(len(rows), "record"))


def _to_seconds(time: str) -> str:
    """As `--since` takes it; the record has the fractions."""
    return re.sub(r"\.\d+", "", time)
