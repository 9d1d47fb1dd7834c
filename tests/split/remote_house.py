"""An enclave, an owner and clients of other owners, each in a thread: the code of their processes, in memory."""

import threading
from collections import deque
from contextlib import ExitStack

import torch
from split_house import CONFIG, LIMITS, House
from split_scene import SEQ, VOCAB

from phalanx.engine import NO_EXTRAS
from phalanx.objectives import mark_classes
from phalanx.security.tee import SimAttester
from phalanx.split import ENCLAVE, FrontPart, kinds_of_task, microbatches_of, task_of
from phalanx.split.channel import messages as say
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.connection import Connection
from phalanx.split.config import OWNER
from phalanx.split.handshake.meeting import ClientHandshake
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.split.hardware.measure import measure_code, policy_of
from phalanx.split.roles.client_end import ClientEnd
from phalanx.split.roles.remote_lead import RemoteLead
from phalanx.split.roles.server import EnclaveServer
from phalanx.split.roles.turns import TurnTaker
from phalanx.telemetry import PhaseTimer
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.testing.split import MemoryEpochs
from phalanx.transport import Endpoint

CLASSES, MICROBATCHES = 3, 4
CLIENTS = ("north", "south")


class Texts:
    """Texts of one client; draw k is the same in every process."""

    def __init__(self, number, count=2):
        self.own_microbatches = microbatches_of(f"client-{number}", MICROBATCHES, ("client-0", "client-1"))
        self.number, self.count = number, count

    def rows(self, *seed, rows=1):
        generator = torch.Generator().manual_seed(hash((self.number, *seed)))
        classes = torch.randint(0, CLASSES, (rows,), generator=generator).tolist()
        ids = torch.randint(CLASSES, VOCAB, (rows, SEQ), generator=generator)
        ids[:, 0] = torch.tensor(classes)
        return ids, mark_classes(classes, [SEQ] * rows, SEQ), NO_EXTRAS

    def draw_rows(self, draw):
        return [self.rows(1, draw, at) for at in range(len(self.own_microbatches))]

    def held_out(self):
        return iter([self.rows(2, at, rows=3) for at in range(self.count)])


class RemoteHouse(House):
    """One run of clients of other owners, of which sessions can be ended and begun again."""

    def __init__(self, source, directory, **given):
        given = {"remote_clients": CLIENTS, "remote_enclave": "localhost:7071", "pki": "keys", **given}
        super().__init__(source, directory, "sealed", **given)
        self.objective, self.classes = "classification", CLASSES
        self.rows, self.steps = 1, 20

    def open(self):
        self.session += 1
        return RemoteSession(self, f"session-{self.session}")

    def config(self, session):
        changed = {"passes_turns": True, "rows": self.rows, "steps": self.steps}
        return super().config(session).model_copy(update=changed)


class RemoteSession:
    """One session, before the parties have met; clients are joined one by one."""

    def __init__(self, house, name):
        self.house, self.name, self._stack = house, name, ExitStack()
        self.network, split = MemoryNetwork(), house.split
        self.endpoints = {party: self.endpoint(party) for party in house.identities}
        config = house.config(name)
        self.server = EnclaveServer(config, house.identities[ENCLAVE], self.endpoints[ENCLAVE], house.source)
        self.failures = deque()
        self.threads = [threading.Thread(target=self._run, daemon=True)]
        self.threads[0].start()
        task = task_of(house.objective, house.classes)
        width = house.source.hidden_size
        self.kinds = kinds_of_task(task, house.rows, SEQ, width, split.wire)
        self.front = FrontPart(house.source, split.cut, wire=split.wire)
        self.server.announce_address("")

    def endpoint(self, party, session=None, network=None):
        peers = {other: one.public for other, one in self.house.identities.items() if other != party}
        wire = (network or self.network).wire_for(party)
        return self._stack.enter_context(
            Endpoint(self.house.identities[party], peers, session or self.name, wire, LIMITS)
        )

    def _run(self):
        try:
            self.server.serve_messages()
        except Exception as exc:  # noqa: BLE001 - a test looks at it
            self.failures.append(exc)

    def prove(self, name):
        """What makes a client's evidence: a simulation of this very program."""
        attester = SimAttester(self.house.identities[name], measure_code())
        return lambda binding: attester.make_evidence(binding).to_bytes()

    def party(self, name, session=None, policy=None, aside=lambda message: False, proves=None):
        """A party with its connection; session, policy and evidence can be other ones than they should be."""
        house = self.house
        line = Connection(self.endpoints[name], ENCLAVE, LIMITS.timeout_s, lambda: None, aside)
        keys = attested_keys(house.identities[ENCLAVE].public)
        terms = HandshakeTerms(
            session or self.name, bytes.fromhex(CONFIG), house.identities[ENCLAVE].public, keys, house.split.chunk_bytes
        )
        accepts = policy or (lambda: policy_of(house.split))
        made = proves or self.prove(name)
        handshake = ClientHandshake(house.identities[name], terms, MemoryEpochs(), accepts, made)
        return EnclavePeer(house.identities[name], line, handshake)

    def client(self, name, texts=None, front=None, **given):
        """A client at the point where it has met the enclave."""
        party = self.party(name, **given)
        end = ClientEnd(party, front or self.front, self.kinds, PhaseTimer())
        party.connection.await_message(say.EnclaveReady)
        end.meet_enclave()
        texts = texts or Texts(CLIENTS.index(name))
        return TurnTaker(self.house.split, self.house.steps, party, end, texts), party

    def ready(self, **changes):
        facts = {"model": self.house.source.files_digest(), "tokenizer": "ab" * 32, "data": "cd" * 32, **changes}
        return ask.ClientReady(**facts)

    def join(self, name, texts=None, proves=None, front=None, **changes):
        """Have a client work in a thread of its own until it is told to conclude."""

        def work():
            try:
                taker, party = self.client(name, texts, front, proves=proves)
                party.connection.send_message(self.ready(**changes))
                taker.take_turns()
                taker.conclude_session(self.house.identities[ENCLAVE].public)
            except Exception as exc:  # noqa: BLE001 - a test looks at it
                self.failures.append(exc)

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def lead(self, aside=lambda message: False, num_classes=CLASSES, num_pair_sums=0):
        """The owner, once all clients are ready."""
        lead = RemoteLead(self.house.split, self.party(OWNER, aside=aside), num_classes, num_pair_sums)
        lead.meet_enclave()
        return lead

    def wait(self):
        for thread in self.threads:
            thread.join(20.0)

    def die(self):
        self.server._is_over = True
        self.threads[0].join(10.0)
        self._stack.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.die()
