"""phalanx invite: one line for each machine that is to join."""

import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer, print_object
from phalanx.cli.console import print_line
from phalanx.cli.parties.join_split import ENCLAVE
from phalanx.cli.parties.pki_request import complete_pki

if TYPE_CHECKING:
    from phalanx.security.invite import JoinTerms
    from phalanx.train import PipelineRun

_LASTS = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_LONGEST = timedelta(days=30)
_LOOK_S = 0.5


def invite(
    target: Annotated[Path, typer.Argument(metavar="RUN.toml|PKI_DIR", help="The run file, or the pki directory.")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="Party to invite; may be repeated. Default: wait for those already invited."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Name or address by which the others reach this machine; default: its host name.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: the port of the run.")] = None,
    expires: Annotated[str, typer.Option(help="Validity of the token: 30m, 24h, 7d.")] = "24h",
    wait: Annotated[bool, typer.Option(help="Wait here until all have joined.")] = True,
) -> Answer:
    """Print a token for each invited machine; each token certifies the machine's keys once."""
    import socket

    from phalanx.security.invite import EnrolmentServer, Invitations
    from phalanx.train.parties.invited import invited_to

    lasts = _parse_duration(expires)
    directory, bind, terms = invited_to(target, name or [], port, _worker_terms)
    complete_pki(directory)
    invitations = Invitations(directory)
    with EnrolmentServer(directory, invitations, terms, print_line) as server:
        if wait:
            server.start_listening(bind, terms.port if port is None else port)
        reached = f"{host or socket.gethostname()}:{server.port or port or terms.port}"
        for party in name or []:
            token = invitations.invite_party(party, reached, lasts)
            token_text, until = token.to_text(), token.expires_at.isoformat()
            typer.echo(
                f"{party}: valid until {until}, connects to {reached}; run on the machine of {party}:\n"
                f"  phalanx join {token_text}{_client_options(terms, party)}"
            )
            print_object({"name": party, "token": token_text, "expires_at": until, "address": reached})
        if wait:
            typer.echo("waiting for all to join; Ctrl-C stops, `phalanx invite` without --name waits again")
        pause = threading.Event()
        while wait and invitations.open_names():
            pause.wait(_LOOK_S)
    if wait:
        typer.echo("all have joined; start the run with `phalanx train`")
    return Answer({"invited": name or [], "awaited": invitations.open_names()})


def _parse_duration(text: str) -> timedelta:
    from phalanx.errors import ConfigError

    match = _LASTS.fullmatch(text)
    lasts = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else timedelta()
    if not timedelta() < lasts <= _LONGEST:
        raise ConfigError(
            f"--expires: found {text[:40]!r}, expected a duration such as 30m, 24h or 7d, at most 30 days"
        )
    return lasts


def _worker_terms(run: "PipelineRun") -> "JoinTerms":
    from phalanx.train import join_terms

    return join_terms(run)


def _client_options(terms: "JoinTerms", name: str) -> str:
    return " --train FILE --test FILE" if terms.run and name != ENCLAVE else ""
