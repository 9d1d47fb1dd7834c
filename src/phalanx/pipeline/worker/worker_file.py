"""The file of a worker, read and looked at before torch is imported."""

import re
from pathlib import Path

from phalanx.config import load_config
from phalanx.engine import check_build
from phalanx.errors import ConfigError
from phalanx.pipeline.config import WorkerConfig
from phalanx.security.crypto import load_identity

_ADDRESS = re.compile(r"\S+:\d{1,5}")


def read_worker(path: Path) -> WorkerConfig:
    """Read a worker file, and refuse one that names no address, no keys or no device that can be.

    Raises:
        ConfigError: A key is wrong; or the owner's address has no port, or this build of torch no such device.
        CertificateError: The worker's identity is unusable.
    """
    config = load_config(path, WorkerConfig)
    if not _ADDRESS.fullmatch(config.owner):
        raise ConfigError(
            f"{path}: owner: found {config.owner!r}; expected host:port, for example {config.owner or 'owner'}:7070"
        )
    check_build(config.device, "device")
    load_identity(Path(config.identity))
    return config
