"""phalanx pki request and sign: keys that never leave the machine that uses them."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer

REQUEST_FILE = "request.csr"


def request(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Party name: a-z, 0-9 and hyphen.")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Directory of the keys; default: NAME.")] = None,
    authority: Annotated[
        Path | None, typer.Option(help="Certificate of the only authority that may sign; default: any authority.")
    ] = None,
) -> Answer:
    """Make a party's keys on this machine, or use existing keys, and write a certificate request."""
    from phalanx.security.crypto import (
        certificate_fingerprint,
        load_authority,
        make_request,
        read_request,
        write_public,
    )

    home = directory or Path(name)
    asked = None if authority is None else certificate_fingerprint(load_authority(authority), str(authority))
    pem = make_request(home, name, asked)
    write_public(home / REQUEST_FILE, pem)
    typer.echo(f"{home / REQUEST_FILE}: send this file to the holder of the authority; the keys beside it stay here")
    message_key = read_request(pem).peer.public_key.hex()
    typer.echo(f"message key  {message_key}")
    typer.echo(f"save the returned certificate.pem and authority.pem in {home}")
    return Answer({"request": home / REQUEST_FILE, "party": name, "message_key": message_key})


def sign(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that init made.")],
    request_file: Annotated[Path, typer.Argument(metavar="REQUEST", help="Request that pki request wrote.")],
    name: Annotated[str | None, typer.Option(help="Party that you expect; required for the owner.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Additional DNS name or address; may be repeated. A request cannot ask for any."),
    ] = None,
    days: Annotated[int, typer.Option(help="Validity in days, at most the authority's.")] = 90,
) -> Answer:
    """Certify keys of another machine; a copy of the certificate stays here for the run."""
    from phalanx.errors import CertificateError
    from phalanx.security.crypto import (
        certificate_facts,
        certificate_fingerprint,
        read_public,
        read_request,
        sign_request,
    )

    pem = read_public(request_file)
    party = read_request(pem, str(request_file)).peer
    if name is None and party.name == "owner":
        raise CertificateError(
            f"{request_file}: asks for the role of the owner of your runs; if you made the request, add --name owner"
        )
    hosts = tuple(host) if host else ()
    home = sign_request(directory, pem, name=name, hosts=hosts, days=days, where=str(request_file))
    file = home / "certificate.pem"
    signed = {
        "party": party.name,
        "message_key": party.public_key.hex(),
        "valid_until": certificate_facts(read_public(file), str(file)).not_after.isoformat(),
        "authority": certificate_fingerprint(read_public(home / "authority.pem")),
    }
    typer.echo(f"party        {signed['party']}")
    typer.echo(f"message key  {signed['message_key']}; compare it with what pki request printed")
    typer.echo(f"valid until  {signed['valid_until']}")
    typer.echo(f"authority    {signed['authority']}")
    typer.echo(f"{file}: stays here for the run; return copies of it and of {home / 'authority.pem'}")
    return Answer({**signed, "certificate": file})


def complete_pki(directory: Path) -> None:
    """Make the authority and the owner's keys where there are none yet."""
    from phalanx.security.crypto import create_authority, issue_certificate

    if not (directory / "authority.pem").exists():
        create_authority(directory)
        typer.echo(f"{directory}: a new authority, valid for a year; anyone with authority.key can certify parties")
    if not (directory / "owner").exists():
        issue_certificate(directory, "owner")
