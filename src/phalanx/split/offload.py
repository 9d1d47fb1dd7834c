"""Where a masked split gives the enclave's frozen linear layers to workers who see uniform numbers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from phalanx.models import StageModule
from phalanx.security.crypto import Identity
from phalanx.split.config import ACCELERATORS
from phalanx.split.enclave_file import EnclaveConfig
from phalanx.split.masked import (
    IdlePads,
    LocalMaskedWorkers,
    MaskedDesk,
    mask_linears,
    pad_sources,
    remote_workers,
)


@contextlib.contextmanager
def offloading(config: EnclaveConfig, identity: Identity, back: StageModule) -> Iterator[None]:
    """Start the workers beside an enclave, and have them multiply in the back part's place while this lasts.

    Args:
        config: What the enclave was started with.
        identity: The enclave.
        back: Changed in place; left as it is where the mode is another one.

    Raises:
        PeerLostError: A worker did not come.
        ModelError: Nothing can be masked.
    """
    split = config.split
    if split.mode != "masked":
        yield
        return
    masked = split.masked.for_tokens(config.rows * config.seq)
    transport = split.transport.model_copy(update={"port": 0})
    directory = Path(config.directory) / ACCELERATORS
    processes = LocalMaskedWorkers(
        directory, Path(config.identity).parent, transport, split.masked_device, config.threads
    )
    with remote_workers(identity, split.masked_workers, config.run, transport, processes) as ports:
        first, *others = ports.values()
        desk = MaskedDesk(first, pad_sources(masked, config.run), masked, others[0] if others else None)
        mask_linears(back, desk)
        with IdlePads(desk, masked.reserve):
            yield
