"""`tonle audit`: verify, search, export, replay and prune the audit trail. Never loads torch.

Exit status: 0 success · 1 findings, differences or an error · 2 usage.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonle.cli import audit_records, screen
from tonle.errors import ConfigError, InternalError, InvalidRequest

if TYPE_CHECKING:
    from tonle.audit.chain import Chain
    from tonle.audit.findings import Report

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
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="The signing key; to verify, its public part is enough. Default: the key known for DIR, or the one in it.",
        envvar="TONLE_AUDIT_KEY_FILE",
        show_default=False,
        show_envvar=False,
    ),
]
FingerprintOption = Annotated[
    str | None,
    typer.Option(
        "--fingerprint",
        metavar="HEX",
        help="The fingerprint that the key must have.",
        envvar="TONLE_AUDIT_FINGERPRINT",
        show_default=False,
        show_envvar=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.", show_default=False)]


@audit.command("verify")
def verify(
    directory: DirectoryArgument,
    day: Annotated[str | None, typer.Option(metavar="DAY", help="Only the records of this day, YYYY-MM-DD.")] = None,
    key_file: KeyOption = None,
    fingerprint: FingerprintOption = None,
    anchor: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="A link noted earlier (tonle audit head) that must still be in the chain."),
    ] = None,
    anchor_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file of such, written by a server with --audit-anchor.",
            envvar="TONLE_AUDIT_ANCHOR",
            show_default=False,
            show_envvar=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that nothing was edited, deleted, swapped, cut off or rolled back; print one line for each finding.

    The key and the last known end of the chain are compared with what this user remembers of DIR. A trail that is in order is
    remembered for the next time.

    [dim]Example:[/dim]  tonle audit verify audit --key-file /secure/audit.key

    Exit status: 0 nothing was found, 1 something was. A key that is seen for the first time, in DIR itself, is a warning.
    """
    import msgspec

    from tonle.audit.record_file import escape_controls
    from tonle.audit.verify import verify as check

    _check_day(day)
    report = check(
        directory,
        day=day,
        key_file=key_file,
        fingerprint=fingerprint,
        anchor=anchor,
        anchor_path=anchor_file,
        remember=True,
    )
    if as_json:
        typer.echo(escape_controls(msgspec.json.format(msgspec.json.encode(report), indent=2)).decode())
    else:
        _print_report(report, directory)
    if not report.ok:
        raise typer.Exit(FOUND_SOMETHING)


def _print_report(report: Report, directory: Path) -> None:
    from rich.text import Text

    err = screen.stderr()
    for finding in report.findings:
        typer.echo(screen.one_line(str(finding)))
    if report.num_unlisted:
        typer.echo(f"and {report.num_unlisted:,} more")
    for note in report.notes:
        err.print(Text(f"note: {screen.one_line(note)}", style="dim"))
    num_findings = len(report.findings) + report.num_unlisted
    verdict = "no findings" if report.ok else screen.count(num_findings, "finding")
    records, days = screen.count(report.num_records, "record"), screen.count(len(report.days), "day")
    if report.num_media:
        records += f" with {screen.count(report.num_media, 'file')} of media"
    err.print(Text(f"{records} in {days}: {verdict}"))
    err.print(Text(screen.one_line(f"key {report.key}, {report.key_from}")))
    if report.anchors:
        err.print(Text(screen.one_line(f"the chain has the lines noted in {', '.join(report.anchors)}")))
    if report.first_use:
        err.print(Text(_first_use(report, directory), style="yellow"))


def _first_use(report: Report, directory: Path) -> str:
    consistent = "The trail is consistent with" if report.ok else "Signatures were checked with"
    return (
        f"Warning: first use. {consistent} the key found in {screen.one_line(str(directory))} itself, which proves nothing about "
        "its author. Compare the fingerprint with the one on the server that wrote the trail (tonle audit verify prints it "
        "there), and give it here with --fingerprint."
    )


@audit.command("trust")
def trust(directory: DirectoryArgument, key_file: KeyOption = None, fingerprint: FingerprintOption = None) -> None:
    """Accept the key and the end of a trail as they are now; verify compares with them from then on.

    For a trail that was replaced, moved or restored from a copy on purpose.

    [dim]Example:[/dim]  tonle audit trust audit --fingerprint 7d3c…
    """
    from tonle.audit.trust import trust as accept

    with _refusals_of(directory):
        before, now = accept(directory, key_file=key_file, fingerprint=fingerprint)
    if before is not None and before.fingerprint != now.fingerprint:
        screen.stderr().print(f"forgotten: key {before.fingerprint}, known since {before.since[:10]}")
    end = "no line yet" if now.head is None else f"line {now.head.seq} of {now.head.day}"
    screen.stderr().print(f"trusted: key {now.fingerprint}, up to {end}")


@audit.command("head")
def head(directory: DirectoryArgument) -> None:
    """Print the end of the chain: day, sequence number and link.

    Stored elsewhere, the link later proves that nothing before it has changed (verify --anchor).

    [dim]Example:[/dim]  tonle audit head audit >> /elsewhere/heads
    """
    from tonle.audit import day_ledger

    with _refusals_of(directory):
        days = day_ledger.days_in(directory)
        last = day_ledger.read_head(directory / days[-1] / day_ledger.HEAD_NAME) if days else None
    if last is None:
        raise ConfigError(f"there is no audit trail in {directory}")
    typer.echo(screen.one_line(f"{last.day} {last.seq} {last.link}"))


@audit.command("recover")
def recover(directory: DirectoryArgument, key_file: KeyOption = None) -> None:
    """Repair a trail after a crash, as the server does when it starts. Repairs are noted in the chain."""
    from tonle.audit.recover import recover as repair

    with _refusals_of(directory):
        notes = repair(_chain(directory, key_file))
    for name, value in notes.items():
        typer.echo(screen.one_line(f"{name}: {_in_words(value)}"))
    screen.stderr().print("repaired" if notes else "nothing to repair")


@audit.command("prune")
def prune(
    directory: DirectoryArgument,
    keep_days: Annotated[int, typer.Option(metavar="N", min=1, help="Days to keep, besides today.")],
    content: Annotated[
        bool,
        typer.Option("--content", metavar="", help="Remove only prompts and answers; keep who, when and how long."),
    ] = False,
    key_file: KeyOption = None,
) -> None:
    """Remove old days, or only the prompts and answers in them. The chain stays valid and notes what was removed.

    [dim]Example:[/dim]  tonle audit prune audit --keep-days 90
    """
    from tonle.audit.retention import prune_days

    chain = _chain(directory, key_file)
    if not content:
        with _refusals_of(directory):
            days = prune_days(chain, keep_days)
        for day in days:
            typer.echo(f"removed {day}")
        screen.stderr().print(
            f"removed {screen.count(len(days), 'day')}" if days else f"nothing to remove: {_no_older_days(keep_days)}"
        )
    else:
        with _refusals_of(directory):
            num_changed = _remove_content(chain, keep_days)
        if not num_changed:
            screen.stderr().print(f"nothing to remove: {_no_older_days(keep_days)}, or their content is gone already")
    _refresh_index(directory)


def _remove_content(chain: Chain, keep_days: int) -> int:
    from tonle.audit import day_ledger
    from tonle.audit.ledger_reader import texts_of
    from tonle.audit.retention import old_days, redact_records, removing
    from tonle.audit.seal import CONTENT

    num_changed = 0
    for day in old_days(chain.directory, keep_days):
        lines = [day_ledger.decode_line(text) for text in texts_of(chain.ledger(day)) if text]
        names = [str(line.file) for line in lines if line.kind == "record" and day_ledger.is_file_name(line.file)]
        files = [path for name in names if (path := chain.directory / day / name).exists()]
        changed = redact_records(chain, files, removing(CONTENT), reason=f"older than {keep_days} days")
        num_changed += len(changed)
        if changed:
            typer.echo(f"{day}: removed prompts and answers from {screen.count(len(changed), 'record')}")
    return num_changed


@audit.command("redact")
def redact(
    directory: DirectoryArgument,
    record_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Short id, request id, response id or file.", show_default=False)
    ] = None,
    field: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Remove this field; repeatable.")] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Mask what this rule finds: email, phone, card, iban, ipv4, …, or name=regex; repeatable.",
        ),
    ] = None,
    every_record: Annotated[bool, typer.Option("--all", metavar="", help="Redact every record.")] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Stored with the redaction.")] = "on request",
    key_file: KeyOption = None,
) -> None:
    """Remove fields from records, or mask personal data in them. Their hashes still verify.

    [dim]Example:[/dim]  tonle audit redact audit 004adba9 --field user_input --field messages
    [dim]Example:[/dim]  tonle audit redact audit --all --pattern email --pattern phone
    """
    from tonle.audit.index import Index, Query
    from tonle.audit.redaction import Redactor
    from tonle.audit.retention import masking, redact_records, removing
    from tonle.audit.seal import SEALED

    if (record_id is None) != every_record:
        raise InvalidRequest("give the id of one record, or --all")
    if bool(field) == bool(pattern):
        raise InvalidRequest("give either --field or --pattern")
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
    with _refusals_of(directory):
        redacted = redact_records(chain, files, change, reason=reason)
    for path in redacted:
        typer.echo(screen.one_line(f"{path.parent.name}/{path.name}"))
    screen.stderr().print(f"redacted {screen.count(len(redacted), 'record')}" if redacted else "nothing to redact")
    _refresh_index(directory)


def _check_day(day: str | None) -> None:
    if day is None:
        return
    try:
        datetime.date.fromisoformat(day)
    except ValueError:
        raise InvalidRequest(f"{day!r} is not a day; write it as 2025-01-31", param="day") from None


def _no_older_days(keep_days: int) -> str:
    return f"no records are older than {screen.count(keep_days, 'day')}"


def _in_words(value: Any) -> str:
    """A note of `recover` without Python's brackets; what is not known is left out."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each is not None)
    return ", ".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)


def _chain(directory: Path, key_file: Path | None) -> Chain:
    from tonle.audit.audit_options import KEY_NAME
    from tonle.audit.chain import Chain
    from tonle.audit.signing_keys import load_key

    if not os.path.isdir(directory):  # noqa: PTH112 - pathlib raises for some names
        raise ConfigError(f"there is no directory {directory}")
    return Chain(directory, load_key(key_file or directory / KEY_NAME))


@contextlib.contextmanager
def _refusals_of(directory: Path) -> Iterator[None]:
    """What the disk or an odd file refuses, as one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise InternalError(f"{directory}: {reason}; `tonle audit verify` says what is wrong with it") from error


def _refresh_index(directory: Path) -> None:
    """An index that exists must not go on holding what was removed."""
    from tonle.audit.index import INDEX_NAME, Index

    if (directory / INDEX_NAME).exists():
        with Index(directory):
            pass
