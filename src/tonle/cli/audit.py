"""`tonle audit`: check, search, export, replay and forget what a trail holds. Never loads torch.

Exit status: 0 all is well · 1 findings, differences or an error · 2 usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonle.cli import audit_records, screen
from tonle.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from tonle.audit.chain import Chain

FOUND_SOMETHING = 1

audit = typer.Typer(
    name="audit",
    help="Check, search, export, replay and prune the audit trail.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
audit_records.register(audit)

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The audit directory.", show_default=False)]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key-file", metavar="FILE", help="The signing key; public suffices to verify.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.", show_default=False)]


@audit.command("verify")
def verify(
    directory: DirectoryArgument,
    day: Annotated[str | None, typer.Option(metavar="DAY", help="Only the records of this day, YYYY-MM-DD.")] = None,
    key_file: KeyOption = None,
    anchor: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="A link noted earlier (tonle audit head) that must still be in the chain."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find every edit, deletion, swap and truncation, one line each.

    [dim]Example:[/dim]  tonle audit verify audit --key-file /secure/audit.key

    Exit status: 0 nothing was found, 1 something was.
    """
    import msgspec

    from tonle.audit.verify import verify as check

    report = check(directory, day=day, key_file=key_file, anchor=anchor)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        for finding in report.findings:
            typer.echo(screen.harmless(str(finding)))
        for note in report.notes:
            screen.stderr().print(f"[dim]note: {note}[/dim]")
        verdict = "in order" if report.ok else f"{len(report.findings)} findings"
        days = f"{len(report.days)} day{'s' * (len(report.days) != 1)}"
        screen.stderr().print(f"{report.num_records} records in {days}: {verdict} (key {report.key})")
    if not report.ok:
        raise typer.Exit(FOUND_SOMETHING)


@audit.command("head")
def head(directory: DirectoryArgument) -> None:
    """Print where the chain ends: day, seq and link. Kept elsewhere, it proves later that nothing before it changed.

    [dim]Example:[/dim]  tonle audit head audit >> /elsewhere/heads
    """
    from tonle.audit import day_ledger

    days = day_ledger.days_in(directory)
    last = day_ledger.read_head(directory / days[-1] / day_ledger.HEAD_NAME) if days else None
    if last is None:
        raise ConfigError(f"there is no audit trail in {directory}")
    typer.echo(f"{last.day} {last.seq} {last.link}")


@audit.command("recover")
def recover(directory: DirectoryArgument, key_file: KeyOption = None) -> None:
    """Repair what a killed server left, as the server itself does when it starts. What it did is noted in the chain."""
    from tonle.audit.recover import recover as repair

    notes = repair(_chain(directory, key_file))
    for name, value in notes.items():
        typer.echo(screen.harmless(f"{name}: {value}"))
    screen.stderr().print("repaired" if notes else "nothing to repair")


@audit.command("prune")
def prune(
    directory: DirectoryArgument,
    keep_days: Annotated[int, typer.Option(metavar="N", min=1, help="Days that are kept, besides today.")],
    content: Annotated[
        bool, typer.Option("--content", metavar="", help="Remove words only; keep who, when, how long.")
    ] = False,
    key_file: KeyOption = None,
) -> None:
    """Remove old days, or the words of their records. The chain stays valid and says what was removed.

    [dim]Example:[/dim]  tonle audit prune audit --keep-days 90
    """
    from tonle.audit import day_ledger
    from tonle.audit.retention import old_days, prune_days, redact_records, removing
    from tonle.audit.seal import CONTENT

    chain = _chain(directory, key_file)
    if not content:
        for day in prune_days(chain, keep_days):
            typer.echo(f"removed {day}")
    else:
        for day in old_days(directory, keep_days):
            names = [
                line.file for _, line in day_ledger.read_lines(chain.ledger(day).read_bytes()) if line.kind == "record"
            ]
            files = [path for name in names if name and (path := directory / day / name).exists()]
            changed = redact_records(chain, files, removing(CONTENT), reason=f"older than {keep_days} days")
            typer.echo(f"{day}: {len(changed)} records without their words")
    _refresh_index(directory)


@audit.command("redact")
def redact(
    directory: DirectoryArgument,
    record_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Short id, request id, response id or file.", show_default=False)
    ] = None,
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Remove this field; give it several times.")
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Mask what this finds: email, phone, card, iban, ipv4, ..., or name=regex."),
    ] = None,
    every_record: Annotated[bool, typer.Option("--all", metavar="", help="In every record.")] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Kept with the redaction.")] = "on request",
    key_file: KeyOption = None,
) -> None:
    """Remove fields, or mask personal data, in records that are already written. Their hashes still verify.

    [dim]Examples:[/dim]  tonle audit redact audit 004adba9 --field user_input --field messages
               tonle audit redact audit --all --pattern email --pattern phone
    """
    from tonle.audit.index import Index, Query
    from tonle.audit.redaction import Redactor
    from tonle.audit.retention import masking, redact_records, removing
    from tonle.audit.seal import SEALED

    if (record_id is None) != every_record:
        raise InvalidRequest("name one record, or give --all")
    if bool(field) == bool(pattern):
        raise InvalidRequest("give --field or --pattern")
    for name in field or ():
        if name not in SEALED:
            raise InvalidRequest(f"{name} cannot be redacted; these can: {', '.join(SEALED)}", param=name)
    chain = _chain(directory, key_file)
    with Index(directory) as index:
        if record_id is not None:
            files = [index.locate(record_id)]
        else:
            files = [directory / row.day / row.file for row in index.find(Query(limit=None))]
    change = removing(field) if field else masking(Redactor(pattern or ()))
    for path in redact_records(chain, files, change, reason=reason):
        typer.echo(f"{path.parent.name}/{path.name}")
    _refresh_index(directory)


def _chain(directory: Path, key_file: Path | None) -> Chain:
    from tonle.audit.audit_options import KEY_NAME
    from tonle.audit.chain import Chain
    from tonle.audit.signing_keys import load_key

    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}")
    return Chain(directory, load_key(key_file or directory / KEY_NAME))


def _refresh_index(directory: Path) -> None:
    """An index that exists must not go on holding what was removed."""
    from tonle.audit.index import INDEX_NAME, Index

    if (directory / INDEX_NAME).exists():
        with Index(directory):
            pass
