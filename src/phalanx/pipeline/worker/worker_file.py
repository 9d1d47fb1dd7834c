"""The file of a worker, read and looked at before torch is imported."""

from pathlib import Path

from phalanx.config import load_config, pin_own_code
from phalanx.engine import check_build
from phalanx.pipeline.config import WorkerConfig
from phalanx.security.crypto import load_identity
from phalanx.transport.config import check_port


def load_worker(path: Path) -> WorkerConfig:
    """Read a worker file; code that it names is pinned as it is now, and not run."""
    config = load_config(path, WorkerConfig, prepare=pin_own_code)
    if config.journal is None and config.device == "cpu":
        config = config.model_copy(update={"journal": str(Path(config.identity) / "state")})
    if not config.code or config.code_home is not None:
        return config
    return config.model_copy(update={"code_home": str(path.parent.resolve())})


def read_worker(path: Path) -> WorkerConfig:
    """Read a worker file, and refuse one with keys, a device or a port that it cannot have.

    Raises:
        ConfigError: A key is wrong, or this build of torch has no such device.
    """
    config = load_worker(path)
    check_build(config.device, "device")
    load_identity(Path(config.identity))
    check_port(config.transport, "transport")
    return config
