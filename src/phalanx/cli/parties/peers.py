"""``phalanx peers``: list parties and their state, and revoke a certificate or an invitation."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer

if TYPE_CHECKING:
    from phalanx.train import PeersView


def peers(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|RUN.toml|PKI_DIR", help="Run directory, run file, or pki directory.")
    ],
    revoke: Annotated[
        str | None, typer.Option(metavar="NAME", help="Revoke this party's certificate, or its unused invitation.")
    ] = None,
    reason: Annotated[str, typer.Option(help="With --revoke: reason, for the audit log.")] = "",
) -> Answer:
    """List the parties of a run: state, stages, audits, verdicts, time of the last message; or revoke a party."""
    from phalanx.errors import ConfigError
    from phalanx.train import look_at_peers

    if reason and revoke is None:
        raise ConfigError("--reason explains a revocation; add --revoke NAME")
    view = look_at_peers(target)
    if revoke is not None:
        from phalanx.cli.console import print_line

        for text in _revoke_party(view.pki, revoke, reason):
            print_line(text)
        view = look_at_peers(target)
    if revoke is None:
        _print_view(view)
    return Answer(view.to_json(time.time()))


def _print_view(view: "PeersView") -> None:
    from phalanx.cli.console import print_line, print_page
    from phalanx.config import printable_text
    from phalanx.telemetry.parties import parties_table

    print_line(view.describe_progress(time.time()))
    print_page(parties_table(view.rows))
    for row in view.rows:
        for verdict in row.verdicts:
            typer.echo(printable_text(f"{row.name} is guilty: {verdict}"))
        if row.note:
            typer.echo(printable_text(f"{row.name} is {row.state}: {row.note}"))
        checks = ", ".join(f"{check} {count}" for check, count in row.audits.items())
        if checks:
            typer.echo(printable_text(f"{row.name} was audited in {row.steps} steps: {checks}"))


def _revoke_party(pki: Path, name: str, reason: str) -> list[str]:
    from phalanx.security.invite import Invitations

    was_open, entry = Invitations(pki).revoke_party(name, reason)
    lines = [f"the invitation of {name} is revoked; its token is refused from now on"] if was_open else []
    if entry is not None:
        lines.append(
            f"the certificate of {name} is revoked: a run under way drops the party before its next step, and no run "
            "admits it again"
        )
    return lines
