"""The process of a client: it calls the enclave, appraises it, and sends the requested batches of its own texts."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from phalanx.config import digest_config
from phalanx.errors import (
    DataError,
    EvidenceError,
    PeerLostError,
    PhalanxError,
    RefusedEvidenceError,
    TransportError,
)
from phalanx.interrupts import allow_interrupts
from phalanx.models import ModelSource, open_model
from phalanx.security.crypto import load_identity, make_private_directory, write_public
from phalanx.security.tee import TIERS
from phalanx.split import ENCLAVE, FrontPart
from phalanx.split.channel import messages as say
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.connection import Connection
from phalanx.split.handshake.meeting import ClientHandshake
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.split.hardware.measure import measure_code
from phalanx.split.hardware.tier import describe_protection, file_counter, open_epochs
from phalanx.split.roles.client import Feedback
from phalanx.split.roles.client_end import ClientEnd
from phalanx.split.roles.turns import TurnTaker
from phalanx.split.training.parts import FewBits
from phalanx.telemetry import PhaseTimer
from phalanx.train.config import SplitRun
from phalanx.train.parties.client_file import ClientFile
from phalanx.train.parties.client_texts import ClientTextsRead, read_texts
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.sessions.enclave_call import CalledEnclave, EnclaveCall, call_enclave
from phalanx.train.sessions.split_cluster import kinds_of, num_classes_of
from phalanx.train.setup.process import deterministic_kernels

_TELL_EVERY = 10
_WEEK_S = 7 * 86400.0
"""How long a client waits for a turn; that the enclave is there is looked at all the time."""

Say = Callable[[str], None]


def run_client(client: ClientFile, run: SplitRun, name: str, tell: Say) -> None:
    """Be a client until the owner ends the run; where a session breaks off, wait for the next one.

    Args:
        client: From `read_client`.

    Raises:
        PeerLostError: No enclave answers within `join_timeout_s`.
        RefusedEvidenceError: The enclave is not one that this client's policy accepts; nothing was sent to it.
        PhalanxError: Texts, model or keys are unusable, or a party has another identity.
    """
    with deterministic_kernels(client.threads), allow_interrupts():
        process = ClientProcess(client, run, name, tell)
        while not process.serve_session():
            tell("waiting for the next session; Ctrl-C stops")


class ClientProcess:
    """A client with its model's front and its texts in memory, over any number of sessions."""

    def __init__(self, client: ClientFile, run: SplitRun, name: str, tell: Say) -> None:
        split = run.split
        make_private_directory(client.state_directory)
        self._client, self._run, self._name, self._tell = client, run, name, tell
        self._identity = load_identity(Path(client.identity))
        source = open_model(run.model, cache_beside(client.state_directory) / "models", run.train.seed)
        read = read_texts(client, run, name, source, tell)
        self._texts = read.draws
        self._front = FrontPart(
            source,
            split.cut,
            attention=run.model.attention,
            wire=split.wire,
            few_bits=FewBits(run.computes_in, run.model.base_quantization),
        )
        self._kinds = kinds_of(run, source, num_classes_of(run))
        self._ready = ready_of(client, source, read)
        tell(f"{name}: agreed to {client.run}, digest {digest_config(run)[:16]}; {describe_protection(split)}")
        if client.attester is not None:
            code = f", code {measure_code().hex()}" if client.attester == "sim" else ""
            tell(f"{name}: gives {client.attester} evidence on request; {TIERS[client.attester]}{code}")

    def serve_session(self) -> bool:
        """Serve one session; return whether the run is over."""
        split, client = self._run.split, self._client
        self._tell(f"looking for the enclave at {split.remote_enclave}")
        call = EnclaveCall(
            self._identity,
            split.remote_enclave or "",
            client.transport,
            client.join_timeout_s,
            client.advertise,
            self._tell,
            stacks_for=ENCLAVE,
        )
        with call_enclave(call) as called:
            try:
                self._run_turns(called)
            except PeerLostError as exc:
                self._tell(f"the session is over: {exc}")
                return False
            except KeyboardInterrupt:
                _send_leave(called, "stopped")
                raise
            except PhalanxError as exc:
                _send_leave(called, _reason_of(exc))
                raise
        self._tell("the owner ended the run; both ends saw the same frames")
        return True

    def _run_turns(self, called: CalledEnclave) -> None:
        client, split = self._client, self._run.split
        connection = Connection(called.endpoint, ENCLAVE, _WEEK_S, called.look)
        party = self._enclave_peer(called, connection)
        self._tell("called; waiting for the other parties")
        connection.await_message(say.EnclaveReady)
        client_end = ClientEnd(party, self._front, self._kinds, PhaseTimer())
        with contextlib.closing(party):
            client_end.meet_enclave()
            result = party.latest_appraisal
            self._tell(f"this client accepts the enclave: {'' if result is None else result.claims.kind}")
            connection.send_message(self._ready)
            taker = TurnTaker(split, self._run.train.steps, party, client_end, self._texts, self._tell_step)
            taker.take_turns()
            statements = taker.conclude_session(called.peer)
        if statements:
            text = {self._name: [statement.decode("ascii") for statement in statements]}
            write_public(client.state_directory / "transcript.json", json.dumps(text, indent=1).encode())

    def _enclave_peer(self, called: CalledEnclave, line: Connection) -> EnclavePeer:
        split, own_directory = self._run.split, self._client.state_directory
        keys = attested_keys(called.peer, called.certificate)
        terms = HandshakeTerms(
            called.session, bytes.fromhex(digest_config(self._run)), called.peer, keys, split.chunk_bytes
        )
        epochs = open_epochs(own_directory, file_counter(own_directory, "epoch"))
        handshake = ClientHandshake(
            self._identity,
            terms,
            epochs,
            lambda: self._client.policy_now(split),
            None if self._client.attester is None else lambda one: self._client.sign_evidence(one, self._identity),
        )
        return EnclavePeer(self._identity, line, handshake)

    def _tell_step(self, step: int, feedback: Feedback) -> None:
        if step % _TELL_EVERY and step + 1 != self._run.train.steps:
            return
        targets = sum(count for _, count in feedback.losses)
        if not targets:
            self._tell(f"step {step + 1}/{self._run.train.steps}  the enclave does not admit these texts")
            return
        mean = sum(loss for loss, _ in feedback.losses) / targets
        self._tell(f"step {step + 1}/{self._run.train.steps}  own loss {mean:.4f}")


def ready_of(client: ClientFile, source: ModelSource, texts: ClientTextsRead) -> ask.ClientReady:
    """Return a client's statement after it has met the enclave."""
    return ask.ClientReady(
        model=source.files_digest(),
        tokenizer=texts.tokenizer,
        data=texts.draws.texts_commitment(client.state_directory),
    )


def _reason_of(error: PhalanxError) -> ask.LeaveReason:
    """Reduce an error to one word: its text may quote this client's data."""
    if isinstance(error, RefusedEvidenceError | EvidenceError):
        return "evidence"
    return "data" if isinstance(error, DataError) else "failed"


def _send_leave(called: CalledEnclave, reason: ask.LeaveReason) -> None:
    with contextlib.suppress(TransportError):
        message = ask.ClientLeft(reason=reason)
        called.endpoint.send_frame(ENCLAVE, message.kind, message.model_dump(mode="json"))
        called.endpoint.flush_frames(5.0)
