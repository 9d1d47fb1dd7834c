"""``phalanx enclave serve`` and ``own``: be the enclave of a split run; the run starts it."""

from pathlib import Path
from typing import Annotated

import typer

_FILE = typer.Argument(metavar="ENCLAVE.toml", help="As a run writes it.")


def serve(enclave_file: Annotated[Path, _FILE]) -> None:
    """Be the enclave of a run with [split]: a run starts it itself, and it ends with that run."""
    from phalanx.child import die_with_parent
    from phalanx.config import load_config
    from phalanx.split.processes.enclave_file import EnclaveConfig
    from phalanx.split.roles.server import serve as serve_enclave

    die_with_parent()
    serve_enclave(load_config(enclave_file, EnclaveConfig))


def own(enclave_file: Annotated[Path, _FILE]) -> None:
    """Be the enclave of a run with [split] and [pipeline]: a run starts it itself, and it ends with that run."""
    from phalanx.child import die_with_parent
    from phalanx.config import load_config
    from phalanx.train.sessions.enclave_owner import EnclaveOwnerConfig, serve_owner

    die_with_parent()
    serve_owner(load_config(enclave_file, EnclaveOwnerConfig))
