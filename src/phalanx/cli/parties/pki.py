"""phalanx pki: keys and certificates for machines that join a run."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.parties.pki_request import request, sign

pki_app = typer.Typer(
    name="pki",
    help="Make an authority, and certify the keys of parties.",
    epilog="Example: phalanx pki init keys && phalanx pki issue keys worker-1 && phalanx pki show "
    "keys/worker-1/certificate.pem",
    no_args_is_help=True,
)


@pki_app.command(epilog="Example: phalanx pki init keys --days 365")
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New directory, best stored offline.")],
    days: Annotated[int, typer.Option(help="Validity in days.")] = 365,
) -> Answer:
    """Make the authority that certifies all parties of a run."""
    from phalanx.security.crypto import create_authority

    create_authority(directory, days)
    typer.echo(f"{directory / 'authority.pem'}: certificate of the new authority, valid for {days} days")
    typer.echo(f"{directory / 'authority.key'}: its key; anyone with it can certify parties")
    return Answer({"certificate": directory / "authority.pem", "key": directory / "authority.key", "days": days})


@pki_app.command(epilog="Example: phalanx pki issue keys worker-1 --host gpu7.example.org --days 90")
def issue(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that init made.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Party name: a-z, 0-9 and hyphen.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Additional DNS name or address; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="Validity in days, at most the authority's.")] = 90,
) -> Answer:
    """Make keys and certificate of a party on this machine: the owner, or a worker of a local run.

    A party on another machine makes its own keys there, with pki request or join; the keys never leave that machine.
    """
    from phalanx.security.crypto import LOCAL_HOSTS
    from phalanx.security.crypto import issue_certificate as issue_identity

    home = issue_identity(directory, name, tuple(host) if host else LOCAL_HOSTS, days)
    typer.echo(f"{home}: keys and certificate of {name}, for use on this machine")
    return Answer({"directory": home, "name": name, "days": days})


pki_app.command(epilog="Example: phalanx pki request alice --dir alice")(request)
pki_app.command(epilog="Example: phalanx pki sign keys request.csr --name alice")(sign)


@pki_app.command(epilog="Example: phalanx pki show keys/worker-1/certificate.pem")
def show(file: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate.")]) -> Answer:
    """Print the contents of a certificate; only the authority beside it, if any, is checked."""
    from phalanx.cli.console import print_line
    from phalanx.security.crypto import (
        certificate_facts,
        certificate_fingerprint,
        load_authority,
        peer_from_certificate,
        read_public,
    )

    pem = read_public(file)
    facts = certificate_facts(pem, str(file))
    authority = file.parent / "authority.pem"
    if facts.peer is None:
        load_authority(file)
        shown = {"authority": facts.subject, "fingerprint": certificate_fingerprint(pem, str(file))}
    else:
        shown = {"party": facts.peer.name, "message_key": facts.peer.public_key.hex()}
        shown |= {"ml_dsa_44": "has a second key" if facts.peer.ml_dsa_key else "none: classical signatures alone"}
        shown |= {"hosts": ", ".join(facts.hosts) or "none"}
    shown |= {"valid_from": facts.not_before.isoformat(), "valid_until": facts.not_after.isoformat()}
    for name, value in shown.items():
        print_line(f"{name.replace('_', ' '):<11}  {value}")
    if facts.peer is not None and authority.exists():
        peer_from_certificate(pem, load_authority(authority), where=str(file))
        typer.echo(f"checked      against {authority}")
        shown |= {"checked_against": str(authority)}
    return Answer(shown)
