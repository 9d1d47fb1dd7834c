"""An enclave in a thread, and its parties: the code of the processes, over a wire in memory."""

import threading
from contextlib import ExitStack

from split_scene import SEQ, batch_of, make_scene

from phalanx.engine import StepInputs
from phalanx.models import ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.security.crypto import Identity
from phalanx.split import ENCLAVE, FrontPart, SplitDriver, kinds_of_task, task_of
from phalanx.split.channel.connection import Connection
from phalanx.split.handshake.meeting import ClientHandshake
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.split.hardware.measure import policy_of
from phalanx.split.processes.local_enclave import OWNER, EnclaveConfig
from phalanx.split.processes.offload import keep_layers
from phalanx.split.roles.server import EnclaveServer
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.testing.split import MemoryEpochs
from phalanx.transport import Endpoint, TransportConfig

LIMITS = TransportConfig(timeout_s=20.0)
CONFIG = "ab" * 32


class House:
    """One run, of which sessions can be ended and begun again.

    Args:
        source: The model.
        directory: The enclave's own.
        given: Changes to the split.
    """

    def __init__(self, source, directory, mode="sealed", **given):
        scene = make_scene(source, mode, **given)
        self.source, self.directory, self.split, self.scene = source, directory, scene.split, scene
        names = (OWNER, ENCLAVE, *self.split.client_names)
        self.identities = {name: Identity.without_certificate(name) for name in names}
        self.session = 0
        self.prepare = keep_layers
        self.objective, self.classes, self.rows = "causal_lm", 0, 1

    def open(self) -> "Session":
        self.session += 1
        return Session(self, f"session-{self.session}")

    def config(self, session) -> EnclaveConfig:
        outside = [name for name in self.identities if name != ENCLAVE]
        return EnclaveConfig(
            identity="",
            directory=str(self.directory / "enclave"),
            run="run",
            session=session,
            config_digest=CONFIG,
            addresses=dict.fromkeys(outside, ""),
            certificates={},
            # never opened: the source is handed over
            model=ModelConfig(path="x", adapter=self.scene.adapter),
            cache="",
            split=self.split,
            optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1, clip_norm=0.5),
            objective=self.objective,
            classes=self.classes,
            rows=self.rows,
            seq=SEQ,
            microbatches=4,
            steps=20,
            seed=0,
        )


class Session:
    """One session of a house: as a context manager it ends in good order, `die` ends it as a crash does."""

    def __init__(self, house, name):
        self.house, self._stack = house, ExitStack()
        network, split = MemoryNetwork(), house.split
        endpoints = {}
        for party, identity in house.identities.items():
            peers = {other: one.public for other, one in house.identities.items() if other != party}
            endpoint = Endpoint(identity, peers, name, network.wire_for(party), LIMITS)
            endpoints[party] = self._stack.enter_context(endpoint)
        self.endpoints = endpoints
        config = house.config(name)
        self.server = EnclaveServer(config, house.identities[ENCLAVE], endpoints[ENCLAVE], house.source, house.prepare)
        self.thread = threading.Thread(target=self.server.serve_messages, daemon=True)
        keys = attested_keys(house.identities[ENCLAVE].public)
        terms_of_run = HandshakeTerms(
            name, bytes.fromhex(CONFIG), house.identities[ENCLAVE].public, keys, split.chunk_bytes
        )
        parties = []
        for party in (OWNER, *split.client_names):
            line = Connection(endpoints[party], ENCLAVE, LIMITS.timeout_s, lambda: None)
            handshake = ClientHandshake(house.identities[party], terms_of_run, MemoryEpochs(), lambda: policy_of(split))
            parties.append(EnclavePeer(house.identities[party], line, None if split.mode == "plaintext" else handshake))
        task = task_of(house.objective, house.classes)
        kinds = kinds_of_task(task, house.rows, SEQ, house.source.hidden_size, split.wire)
        front = FrontPart(house.source, split.cut, wire=split.wire)
        self.lead = SplitDriver(split, parties[0], parties[1:], front, kinds, 4)
        self.thread.start()
        self.server.announce_address("memory")
        self.lead.meet_enclave()

    def train_turn(self, number, batch=None):
        batch = batch or batch_of(number)
        found = self.lead.train_step(number, StepInputs(*(tuple(column) for column in zip(*batch, strict=True)), 0))
        return (found.loss, found.norm)

    def die(self):
        """Both sides are gone, whatever was under way."""
        self.server._is_over = True
        self.thread.join(10.0)
        self._stack.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.lead.end_session()
        self.server._is_over = True
        self.thread.join(10.0)
        self._stack.close()
