"""``phalanx enclave serve``: be the enclave of a split run; the run starts it."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    enclave_file: Annotated[Path, typer.Argument(metavar="ENCLAVE.toml", help="As a run writes it.")],
) -> None:
    """Be the enclave of a run with [split]: a run starts it itself, and it ends with that run."""
    from phalanx.child import die_with_parent
    from phalanx.config import load_config
    from phalanx.split.processes.enclave_file import EnclaveConfig
    from phalanx.split.roles.server import serve as serve_enclave

    die_with_parent()
    serve_enclave(load_config(enclave_file, EnclaveConfig))
