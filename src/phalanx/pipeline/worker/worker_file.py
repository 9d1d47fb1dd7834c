"""The file of a worker, read and looked at before torch is imported."""

from pathlib import Path

from phalanx.config import load_config
from phalanx.engine import check_build
from phalanx.pipeline.config import WorkerConfig
from phalanx.security.crypto import load_identity
from phalanx.transport.port import check_port


def read_worker(path: Path) -> WorkerConfig:
    """Read a worker file, and refuse one with keys, a device or a port that it cannot have.

    Raises:
        ConfigError: A key is wrong, or this build of torch has no such device.
        CertificateError: The worker's identity is unusable.
        TransportError: Where it would listen another process does.
    """
    config = load_config(path, WorkerConfig)
    check_build(config.device, "device")
    load_identity(Path(config.identity))
    check_port(config.transport, "transport")
    return config
