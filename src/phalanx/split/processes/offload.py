"""The one hook of masked mode: the enclave's frozen linear layers go to workers that it does not trust."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from phalanx.models import StageModule
from phalanx.security.crypto import Identity
from phalanx.split.masked import RemoteWorker, local_masked_workers, mask_linears, open_masking_client, remote_workers
from phalanx.split.masked.remote import piped_workers
from phalanx.split.processes.local_enclave import EnclaveConfig

Prepare = Callable[[StageModule], object]
"""Changes the back part before it is trained."""


def keep_layers(back: StageModule) -> None:
    """Leave every layer in the enclave."""


@contextlib.contextmanager
def start_offload(
    config: EnclaveConfig,
    identity: Identity,
    ends: Mapping[str, socket.socket] | None = None,
    bind: str = "",
) -> Iterator[Prepare]:
    """Start or await the workers that multiply for the enclave, where the mode asks for them, and end its own ones.

    Args:
        ends: Pipes to workers that were started for it, where it can start none itself.
        bind: Address at which workers of others are awaited, at the port of ``split.masked.address``.

    Yields:
        What puts masked layers in the place of the back part's frozen ones; adapters, attention, norms and whatever
        else is trained stay in the enclave.
    """
    split, names = config.split, config.split.masked_workers
    if not names:
        yield keep_layers
        return
    with contextlib.ExitStack() as stack:
        opened_workers = (
            piped_workers(identity, config.workers, ends, masked_session(config.session), split.transport)
            if ends
            else _await_workers(config, identity, bind)
            if split.masked.address
            else _start_workers(config, identity)
        )
        workers = stack.enter_context(opened_workers)
        first, second = workers[names[0]], workers[names[1]] if len(names) > 1 else None
        masked = split.masked.for_tokens(config.rows * config.seq)
        offload = stack.enter_context(open_masking_client(masked, config.run, first, second))
        yield lambda back: mask_linears(back, offload)


def masked_session(session: str) -> str:
    """The session between an enclave and workers that were started for it."""
    return f"{session}-masked"


def _await_workers(
    config: EnclaveConfig, identity: Identity, bind: str
) -> contextlib.AbstractContextManager[dict[str, RemoteWorker]]:
    split = config.split
    port = int((split.masked.address or ":0").rpartition(":")[2])
    transport = split.transport.model_copy(update={"bind": bind, "port": port})
    return remote_workers(identity, split.masked_workers, config.run, transport)


def _start_workers(
    config: EnclaveConfig, identity: Identity
) -> contextlib.AbstractContextManager[dict[str, RemoteWorker]]:
    split = config.split
    identities = Path(config.identity).parent
    processes = local_masked_workers(
        # not in the enclave's own directory, which no other process uses
        Path(config.directory).parent / "workers",
        identities,
        split.transport,
        threads=config.threads,
    )
    return remote_workers(identity, split.masked_workers, config.run, split.transport, processes)
