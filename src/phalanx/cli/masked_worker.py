"""``phalanx masked-worker``: multiply masked numbers for a trusted side that does not show what they hide."""

from pathlib import Path
from typing import Annotated

import typer


def masked_worker(
    worker_file: Annotated[Path, typer.Argument(metavar="WORKER.toml", help="The masked worker's file.")],
) -> None:
    """Join a trusted side as its accelerator; it ends when that side ends the run."""
    from phalanx.config import load_config
    from phalanx.split.masked import MaskedWorkerConfig, end_with_parent, run_masked_worker

    end_with_parent()
    run_masked_worker(load_config(worker_file, MaskedWorkerConfig))
