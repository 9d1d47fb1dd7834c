"""``phalanx enclave serve``: be the enclave of others' run; ``local`` and ``own``: of a run that starts it itself."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line

SERVE_EXAMPLES = (
    "Example: phalanx enclave serve run.toml --identity enclave --dir enclave-state\n"
    "\nExit codes: 0 the owner ended the run, 2 wrong run file, 3 wrong model, 4 cannot listen, 5 wrong keys, tier or "
    "sandbox."
)
_FILE = typer.Argument(metavar="ENCLAVE.toml", help="The run's config file.")


def serve(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file, the same for all parties.")],
    identity: Annotated[Path, typer.Option(help="Directory of the enclave's keys and certificate.")] = Path("enclave"),
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory for the key of sealed states; a new one for each run.")
    ] = Path("enclave-state"),
    bind: Annotated[str | None, typer.Option(help="Address to listen on; default: split.remote_enclave.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: split.remote_enclave.")] = None,
) -> Answer:
    """Serve as the enclave of a run with [split] and remote clients, until its owner ends the run."""
    from phalanx.train.parties.enclave_process import EnclaveStart, read_enclave_run, serve_enclave

    start = EnclaveStart(identity, directory, bind, port)
    serve_enclave(read_enclave_run(run_file, start), start, print_line)
    return Answer({"status": "complete"})


def local(enclave_file: Annotated[Path, _FILE]) -> None:
    """Serve as the enclave of a local run with [split]; the run starts and ends this command."""
    from phalanx.child import die_with_parent
    from phalanx.config import load_config
    from phalanx.split.processes.local_enclave import EnclaveConfig
    from phalanx.split.roles.serving import serve_enclave

    die_with_parent()
    serve_enclave(load_config(enclave_file, EnclaveConfig))


def own(enclave_file: Annotated[Path, _FILE]) -> None:
    """Serve as the enclave of a run with [split] and [pipeline]; the run starts and ends this command."""
    from phalanx.child import die_with_parent
    from phalanx.config import load_config
    from phalanx.train.sessions.enclave_owner import EnclaveOwnerConfig, serve_owner

    die_with_parent()
    serve_owner(load_config(enclave_file, EnclaveOwnerConfig))
