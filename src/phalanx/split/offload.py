"""Where a masked split gives the enclave's frozen linear layers to somebody else; the one hook of that mode."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.models import StageModule
from phalanx.security.crypto import Identity
from phalanx.split.enclave_file import EnclaveConfig
from phalanx.split.masked import LocalMaskedWorkers, mask_linears, open_desk, remote_workers

Prepare = Callable[[StageModule], object]
"""Changes the back part before it is trained."""


def as_it_is(back: StageModule) -> None:
    """Leave every layer in the enclave."""


@contextlib.contextmanager
def offloaded(config: EnclaveConfig, identity: Identity) -> Iterator[Prepare]:
    """Start who multiplies for the enclave, where the mode asks for that, and end it whatever happens.

    Yields:
        What puts masked layers in the place of the back part's frozen ones; adapters, attention, norms and whatever
        else is trained stay in the enclave.

    Raises:
        PeerLostError: A worker did not come.
        PadError: Pads cannot be made.
    """
    split, names = config.split, config.split.masked_workers
    if not names:
        yield as_it_is
        return
    identities = Path(config.identity).parent
    processes = LocalMaskedWorkers(
        # not in the enclave's own directory, which is nobody else's
        Path(config.directory).parent / "workers",
        identities,
        split.transport,
        threads=config.threads,
    )
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(remote_workers(identity, names, config.run, split.transport, processes))
        first, second = workers[names[0]], workers[names[1]] if len(names) > 1 else None
        masked = split.masked.for_tokens(config.rows * config.seq)
        desk = stack.enter_context(open_desk(masked, config.run, first, second))
        yield lambda back: mask_linears(back, desk)
