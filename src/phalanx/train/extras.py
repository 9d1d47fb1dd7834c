"""What a run needs of extras, asked for before any process of it starts."""

from phalanx.config.extras import require_bitsandbytes, require_tenseal
from phalanx.planner.model.optimizers import OPTIMIZERS
from phalanx.train.config import RunConfig


def require_extras(run: RunConfig) -> None:
    """Refuse a run that this machine lacks a package for.

    Raises:
        ConfigError: Names the package, and the extra that brings it.
    """
    if run.model.quantize is not None:
        require_bitsandbytes(f'model.adapter.quantize = "{run.model.quantize}"')
    if OPTIMIZERS[run.optimizer.kind].in_bytes:
        require_bitsandbytes(f'optimizer.kind = "{run.optimizer.kind}"')
    if run.federated is not None and run.federated.sums == "homomorphic":
        require_tenseal('federated.sums = "homomorphic"')
