"""The file of a worker, read and looked at before torch is imported."""

from pathlib import Path

from phalanx.config import load_config
from phalanx.engine import check_build
from phalanx.pipeline.config import WorkerConfig
from phalanx.security.crypto import load_identity


def read_worker(path: Path) -> WorkerConfig:
    """Read a worker file, and refuse one that names no keys or no device that can be.

    Raises:
        ConfigError: A key is wrong, or this build of torch has no such device.
        CertificateError: The worker's identity is unusable.
    """
    config = load_config(path, WorkerConfig)
    check_build(config.device, "device")
    load_identity(Path(config.identity))
    return config
