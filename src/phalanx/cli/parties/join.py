"""phalanx join: from a token to a worker that serves, and comes back when its owner does."""

import json
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from phalanx.cli.answers.answer import Answer

if TYPE_CHECKING:
    from phalanx.pipeline import WorkerOutcome

_LOOKS_S = 60


def join(
    line: Annotated[str, typer.Argument(metavar="TOKEN", help="The line that phalanx invite printed.")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Keys and worker file; left out, the name.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Where other parties reach this machine; left out, as the owner is reached.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where to listen; 0 takes any free one.")] = 7070,
    serve: Annotated[bool, typer.Option(help="Serve at once; else only make keys and worker file.")] = True,
) -> Answer:
    """Make keys here, have them certified, and serve until the run is complete; again whenever the owner is back."""
    from phalanx.security.crypto import load_identity
    from phalanx.security.invite import JoinToken, enrol

    token = JoinToken.parse(line)
    home = directory or Path(token.name)
    file = home / "worker.toml"
    if file.exists() and load_identity(home).name == token.name:
        typer.echo(f"{home}: has keys, certificate and worker file already")
    else:
        told = enrol(token, home)
        typer.echo(f"certified as {token.name}; the keys are in {home} and stay there")
        if told.skew_s:
            typer.echo(f"this machine's clock is {told.skew_s:+d} s from the owner's")
        for asked in told.asks:
            typer.echo(f"you are asked to: {asked}")
        file.write_text(_worker_file(home, told.owner, advertise or told.own_host, port), encoding="utf-8")
        typer.echo(f"{file}: settings such as threads, device and memory_mib go there")
    outcome = _serve(file) if serve else None
    ended = "not served" if not serve else "left" if outcome is None else outcome.name.lower()
    return Answer({"name": token.name, "directory": home, "worker_file": file, "status": ended})


def _worker_file(home: Path, owner: str, host: str, port: int) -> str:
    return (
        f"identity = {json.dumps(str(home.resolve()))}\n"
        f"owner = {json.dumps(owner)}\n"
        f"advertise = {json.dumps(f'[{host}]' if ':' in host else host)}\n"
        f"journal = {json.dumps(str(home.resolve() / 'state'))}\n"
        f"join_timeout_s = {_LOOKS_S}.0\n\n"
        f'[transport]\nbind = "{"::" if ":" in host else "0.0.0.0"}"\nport = {port}\n'  # noqa: S104 - others reach it
    )


def _serve(file: Path) -> "WorkerOutcome | None":
    from phalanx.cli.worker import serve_once
    from phalanx.config import load_config
    from phalanx.pipeline import WorkerConfig, keep_serving

    config = load_config(file, WorkerConfig)
    if config.parallel.world > 1:
        return serve_once(config, file)
    # while it serves, the worker itself takes the first signal as the wish to hand over
    signal.signal(signal.SIGTERM, _leave)
    try:
        return keep_serving(lambda: serve_once(config, file), typer.echo, time.sleep)
    except KeyboardInterrupt:
        typer.echo("left while no run was under way")
        return None


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
