"""phalanx join: from a token to a worker that serves, and comes back when its owner does."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.files import write_text
from phalanx.cli.parties.join_split import ENCLAVE, ClientWords, join_split
from phalanx.cli.parties.join_worker import enrol_worker, serve_worker, worker_file


def join(
    line: Annotated[str, typer.Argument(metavar="TOKEN", help="The line that phalanx invite printed.")],
    *,
    directory: Annotated[Path | None, typer.Option("--dir", help="Keys and worker file; left out, the name.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Where other parties reach this machine; left out, as the owner is reached.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where to listen; 0 takes any free one.")] = 7070,
    serve: Annotated[bool, typer.Option(help="Serve at once; else only make keys and files.")] = True,
    train: Annotated[
        Path | None, typer.Option(help="A client of a split: its training texts, which stay here.")
    ] = None,
    test: Annotated[Path | None, typer.Option(help="Its held-out texts.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Which enclave it trusts.")] = None,
    allow_insecure_sim: Annotated[bool, typer.Option(help="It takes an enclave that proves nothing.")] = False,
    attester: Annotated[
        str | None, typer.Option(help="What gives its own evidence, where the run asks for it: tpm, snp, ...")
    ] = None,
    tpm: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Of its TPM, if it is not the device's.")] = None,
) -> Answer:
    """Make keys here, have them certified, and serve until the run is complete; again whenever the owner is back."""
    from phalanx.security.crypto import load_identity
    from phalanx.security.invite import JoinToken

    token = JoinToken.parse(line)
    home = directory or Path(token.name)
    if token.name == ENCLAVE or train or test:
        words = ClientWords(train, test, policy, allow_insecure_sim, attester, tpm)
        return join_split(token, home, words, serve=serve)
    file = home / "worker.toml"
    if file.exists() and load_identity(home).name == token.name:
        typer.echo(f"{home}: has keys, certificate and worker file already")
    else:
        told = enrol_worker(token, home, advertise, port)
        write_text(file, worker_file(home, told.owner, advertise or told.own_host, port))
        typer.echo(f"{file}: settings such as threads, device and memory_mib go there")
    outcome = serve_worker(file) if serve else None
    ended = "not served" if not serve else "left" if outcome is None else outcome.name.lower()
    return Answer({"name": token.name, "directory": home, "worker_file": file, "status": ended})
