"""The enclave process of a run that starts it: on the network, or behind a sandbox with a pipe to all parties."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from phalanx.models import ModelSource, open_model
from phalanx.security.crypto import load_identity, peer_from_certificate
from phalanx.split.channel.frame_pipe import FramePipe, PipeWire
from phalanx.split.config import ENCLAVE
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.split.processes.offload import start_offload
from phalanx.split.roles.server import EnclaveServer, MakeTrainer
from phalanx.transport import Endpoint, GrpcWire

OpenTrainer = Callable[[Endpoint, ModelSource], contextlib.AbstractContextManager[MakeTrainer]]
"""Opens what trains beside the enclave's own endpoint, and ends it whatever happens."""


@contextlib.contextmanager
def _in_this_process(endpoint: Endpoint, source: ModelSource) -> Iterator[MakeTrainer]:
    """Train the whole back part here."""
    del endpoint, source
    yield lambda whole: whole


def serve_enclave(
    config: EnclaveConfig,
    end: socket.socket | None = None,
    workers: Mapping[str, socket.socket] | None = None,
    open_trainer: OpenTrainer = _in_this_process,
) -> None:
    """Be the enclave until the owner ends the session or a party is gone.

    Args:
        end: Its end of a pipe to all parties; without one it listens on the network.
        workers: The enclave's ends of pipes to masked workers; when left out, it starts the workers that it needs.
        open_trainer: Opens what trains; the whole back part in this process when left out.
    """
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    identity, limits = load_identity(Path(config.identity)), config.split.transport
    wire: GrpcWire | PipeWire
    with contextlib.ExitStack() as stack:
        if end is None:
            wire = GrpcWire(identity, limits)
        else:
            pipe = FramePipe(end, limits.max_frame_bytes)
            stack.callback(pipe.close)
            wire = pipe.open_wire(ENCLAVE)
        stack.callback(wire.close)
        with (
            start_offload(config, identity, workers) as prepare,
            Endpoint(identity, {}, config.session, wire, limits) as endpoint,
            # what trains may have something to say to the owner until its end
            contextlib.ExitStack() as inside,
        ):
            for name, pem in config.certificates.items():
                peer = peer_from_certificate(pem.encode("ascii"), identity.authority_pem, where=name)
                endpoint.add_peer(peer, config.addresses[name])
            source = open_model(config.model, Path(config.cache), config.seed)
            trains = inside.enter_context(open_trainer(endpoint, source))
            server = EnclaveServer(config, identity, endpoint, source, prepare, trains)
            server.announce_address(wire.address)
            server.serve_messages()
