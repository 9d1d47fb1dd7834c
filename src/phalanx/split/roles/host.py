"""An enclave that parties of other owners call: session after session, until the owner says that the run is over."""

import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.access_gate import check_caller
from phalanx.errors import IsolationError, PeerLostError
from phalanx.models import open_model
from phalanx.security.crypto import Identity
from phalanx.split.channel.frame_pipe import FramePipe
from phalanx.split.config import OWNER
from phalanx.split.processes.arrivals import Arrivals, PipeRelay
from phalanx.split.processes.confined import ConfinedEnclave
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.split.processes.offload import start_offload
from phalanx.split.roles.server import EnclaveServer
from phalanx.transport import Endpoint, GrpcWire, JoinedPeer, TransportConfig

_LOOK_EVERY_S = 0.2

MakeConfig = Callable[[str, Mapping[str, str]], EnclaveConfig]
"""Makes an enclave's file of a session's name and the certificates of its parties."""


@dataclass(frozen=True)
class EnclaveSettings:
    """Where an enclave is, and which parties call it.

    Attributes:
        directory: Its own; gets its file where it is confined.
        transport: Address and bounds of its server.
        run: Begins the names of its sessions.
        is_confined: Whether it is a process behind a sandbox, which reaches no network.
    """

    identity: Identity
    directory: Path
    transport: TransportConfig
    parties: Sequence[str]
    run: str
    is_confined: bool


class EnclaveHost:
    """The host of an enclave: it listens, waits for all parties, and serves them."""

    def __init__(self, place: EnclaveSettings, make_config: MakeConfig, say: Callable[[str], None]) -> None:
        self._place, self._make_config, self._say = place, make_config, say

    def serve_sessions(self) -> None:
        """Serve until the owner ends the run; a session that breaks off is followed by another one."""
        while True:
            try:
                self._serve_session()
            except PeerLostError as exc:
                self._say(f"the session is over: {exc}")
            else:
                self._say("the owner ended the run")
                return

    def _serve_session(self) -> None:
        place, arrivals = self._place, Arrivals(self._place.parties, self._say)
        session = f"{place.run}-{secrets.token_hex(8)}"
        with contextlib.ExitStack() as stack:
            # of itself an enclave says nothing: where it computes may depend on what it hides
            wire = GrpcWire(place.identity, place.transport, passes_stacks_to=OWNER)
            stack.callback(wire.close)
            wire.name_of, wire.awaited, wire.admit = arrivals.name_of, arrivals.missing_parties, check_caller
            wire.has_dialled_streams = True
            self._say(f"listening on {wire.address} for {', '.join(place.parties)}")
            serve = self._serve_confined if place.is_confined else self._serve_here
            serve(stack, session, wire, arrivals)

    def _serve_here(self, stack: contextlib.ExitStack, session: str, wire: GrpcWire, arrivals: Arrivals) -> None:
        place = self._place
        endpoint = stack.enter_context(Endpoint(place.identity, {}, session, wire, place.transport))
        joined = arrivals.wait_for_all(wire)
        for party in joined.values():
            endpoint.add_peer(party.peer, party.address)
        config = self._make_config(session, _certificates_by_party(joined))
        torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(True)
        source = open_model(config.model, Path(config.cache), config.seed)
        if config.split.masked_workers:
            self._say(f"waiting for {', '.join(config.split.masked_workers)} at {config.split.masked.address}")
        prepare = stack.enter_context(start_offload(config, place.identity, bind=place.transport.bind))
        self._say("all parties are connected; the session begins")
        server = EnclaveServer(config, place.identity, endpoint, source, prepare)
        # each party knows already where it has called
        server.announce_address("")
        server.serve_messages(arrivals.check_returned)

    def _serve_confined(self, stack: contextlib.ExitStack, session: str, wire: GrpcWire, arrivals: Arrivals) -> None:
        place = self._place
        near, far = socket.socketpair()
        stack.callback(far.close)
        pipe = FramePipe(near, place.transport.max_frame_bytes)
        stack.callback(pipe.close)
        relay = PipeRelay(pipe, wire, place.parties, place.transport.timeout_s)
        wire.serve_frames(relay.pass_inward, session)
        joined = arrivals.wait_for_all(wire)
        for name, party in joined.items():
            if party.address:
                wire.add_route(name, party.address)
        config = self._make_config(session, _certificates_by_party(joined))
        process = stack.enter_context(ConfinedEnclave(place.directory, config, far))
        process.start()
        self._say("all parties are connected; the session begins in a sandbox without network")
        while (code := process.poll()) is None:
            arrivals.check_returned()
            # None for as long as nothing of that name calls: a pause that ends with the wire
            wire.wait_joined("", _LOOK_EVERY_S)
        if code == PeerLostError.exit_code:
            raise PeerLostError("a party is lost; the enclave's last lines are above")
        if code:
            raise IsolationError(f"the confined enclave ended with exit code {code}; its last lines are above")


def _certificates_by_party(joined: Mapping[str, JoinedPeer]) -> dict[str, str]:
    return {name: party.certificate.decode("ascii") for name, party in joined.items()}
