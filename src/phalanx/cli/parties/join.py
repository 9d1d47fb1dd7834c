"""phalanx join: from a token to a worker that serves, and comes back when its owner does."""

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.files import write_text
from phalanx.cli.parties.join_split import CLIENT, ENCLAVE, ClientOptions, join_split
from phalanx.cli.parties.join_worker import (
    MASKED_KEYS,
    bracket_host,
    enrol_worker,
    keep_terms,
    serve_masked,
    serve_stage,
    serve_worker,
    serve_writer,
    worker_file,
)
from phalanx.cli.parties.joined import Setting, change_file, has_joined, note_joined

_PORT = 7070


def join(
    token_line: Annotated[
        str,
        typer.Argument(
            metavar="TOKEN", help="Token that phalanx invite printed; - reads it from standard input, unlisted by ps."
        ),
    ],
    *,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for keys and worker file; default: the name.")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="Address of this machine for other parties; default: the address that the owner sees."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes any free one. [default: 7070]", show_default=False)
    ] = None,
    serve: Annotated[bool, typer.Option(help="Serve at once; otherwise only make keys and files.")] = True,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", help="Serve every further run of this owner, such as the runs of a drill, until Ctrl-C."
        ),
    ] = False,
    stage: Annotated[
        bool, typer.Option("--stage", help="Hold a stage of a model that is served, as `phalanx stage-worker` does.")
    ] = False,
    writer: Annotated[
        bool, typer.Option("--writer", help="Write texts for a run with [rollouts], as `phalanx rollout-worker` does.")
    ] = False,
    masked: Annotated[
        bool,
        typer.Option(
            "--masked", help="Multiply masked numbers for a split's enclave, as `phalanx masked-worker` does."
        ),
    ] = False,
    train: Annotated[
        Path | None, typer.Option(help="Client of a split: file of its training texts, which stay here.")
    ] = None,
    test: Annotated[Path | None, typer.Option(help="File of its held-out texts.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy: which enclave it trusts.")] = None,
    allow_insecure_sim: Annotated[bool, typer.Option(help="Accept an enclave that proves nothing.")] = False,
    attester: Annotated[
        str | None, typer.Option(help="Source of its own evidence, where the run requires it: tpm, snp, ...")
    ] = None,
    tpm: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Its TPM, if not the default device.")] = None,
) -> Answer:
    """Make keys, get them certified, and serve until the run is complete; reconnect whenever the owner returns.

    If repeated, the command reuses the keys and files; options on the command line are written into the files.
    """
    from phalanx.errors import ConfigError
    from phalanx.security.invite import JoinToken

    token = JoinToken.from_text(_read_line(token_line))
    home = directory or Path(token.name)
    client_words = ClientOptions(train, test, policy, allow_insecure_sim, attester, tpm)
    if token.name == ENCLAVE or client_words.file_settings or (home / CLIENT).exists():
        return join_split(token, home, client_words, serve=serve)
    if [stage, writer, masked].count(True) > 1:
        raise ConfigError("--stage, --writer and --masked: a machine joins as one of them; give one")
    file = home / ("stage.toml" if stage else "writer.toml" if writer else "masked.toml" if masked else "worker.toml")
    settings: dict[str, Setting] = {} if advertise is None else {"advertise": bracket_host(advertise)}
    settings |= {} if port is None else {"transport.port": port}
    if has_joined(token, home, file):
        typer.echo(f"{home}: already has keys, certificate and worker file")
    else:
        enrolment = enrol_worker(token, home, advertise, _PORT if port is None else port, is_masked=masked)
        owner = keep_terms(token.name, enrolment.run, home) if masked else enrolment.owner
        if file.exists():
            settings["owner"] = owner
        else:
            listens = _PORT if port is None else port
            host = advertise or enrolment.own_host
            more = f"journal = {json.dumps(str(home.resolve() / 'state'))}\n"
            more = MASKED_KEYS if masked else "" if stage or writer else more
            write_text(file, worker_file(home, owner, host, listens, more))
            others = "max_size_bytes" if stage else "device, attention" if writer else "device, memory_mib"
            others = "device" if masked else others
            typer.echo(f"{file}: edit it to set threads, {others} and others")
        note_joined(token, home)
    for change in change_file(file, settings):
        typer.echo(change)
    if not serve:
        ended = "not served"
    elif stage:
        serve_stage(file)
        ended = "complete"
    elif masked:
        serve_masked(file)
        ended = "complete"
    elif writer:
        ended = "complete" if serve_writer(file, stay=stay) else "left"
    else:
        outcome = serve_worker(file, stay=stay)
        ended = "left" if outcome is None else outcome.name.lower()
    return Answer({"name": token.name, "directory": home, "worker_file": file, "status": ended})


def _read_line(text: str) -> str:
    """Return the text, or for a hyphen a line of standard input; a terminal does not show it."""
    if text != "-":
        return text
    return getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline()
