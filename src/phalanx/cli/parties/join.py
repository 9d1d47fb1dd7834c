"""phalanx join: from a token to a worker that serves, and comes back when its owner does."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.files import write_text
from phalanx.cli.parties.join_split import CLIENT, ENCLAVE, ClientWords, join_split
from phalanx.cli.parties.join_worker import bracketed, enrol_worker, serve_worker, worker_file
from phalanx.cli.parties.joined import Setting, change_file, has_joined, note_joined

_PORT = 7070


def join(
    token_line: Annotated[str, typer.Argument(metavar="TOKEN", help="The line that phalanx invite printed.")],
    *,
    directory: Annotated[Path | None, typer.Option("--dir", help="Keys and worker file; left out, the name.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Where other parties reach this machine; left out, as the owner is reached.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Where to listen; 0 takes any free one. [default: 7070]", show_default=False)
    ] = None,
    serve: Annotated[bool, typer.Option(help="Serve at once; else only make keys and files.")] = True,
    stay: Annotated[
        bool, typer.Option("--stay", help="Serve run after run of this owner, such as those of a drill, until Ctrl-C.")
    ] = False,
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
    """Make keys here, have them certified, and serve until the run is complete; again whenever the owner is back.

    The same command once more takes the keys and files that are there; options that are given are written into them.
    """
    from phalanx.security.invite import JoinToken

    token = JoinToken.parse(token_line)
    home = directory or Path(token.name)
    client_words = ClientWords(train, test, policy, allow_insecure_sim, attester, tpm)
    if token.name == ENCLAVE or client_words.settings or (home / CLIENT).exists():
        return join_split(token, home, client_words, serve=serve)
    file = home / "worker.toml"
    settings: dict[str, Setting] = {} if advertise is None else {"advertise": bracketed(advertise)}
    settings |= {} if port is None else {"transport.port": port}
    if has_joined(token, home, file):
        typer.echo(f"{home}: has keys, certificate and worker file already")
    else:
        enrolment = enrol_worker(token, home, advertise, _PORT if port is None else port)
        if file.exists():
            settings["owner"] = enrolment.owner
        else:
            listens = _PORT if port is None else port
            write_text(file, worker_file(home, enrolment.owner, advertise or enrolment.own_host, listens))
            typer.echo(f"{file}: settings such as threads, device and memory_mib go there")
        note_joined(token, home)
    for change in change_file(file, settings):
        typer.echo(change)
    outcome = serve_worker(file, stay=stay) if serve else None
    ended = "not served" if not serve else "left" if outcome is None else outcome.name.lower()
    return Answer({"name": token.name, "directory": home, "worker_file": file, "status": ended})
