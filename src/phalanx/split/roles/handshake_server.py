"""The enclave's answers in handshakes: evidence for a party's nonce, a link for its word, and its own evidence."""

from collections.abc import Iterator, Mapping

from phalanx.config import digest_config
from phalanx.security.crypto import Identity, Peer
from phalanx.security.seal import EpochSource
from phalanx.security.tee import Attester
from phalanx.split.channel import messages as say
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.link import FrameLink, PlainLink
from phalanx.split.channel.message import SplitMessage
from phalanx.split.handshake.client_appraisal import ClientAppraiser, client_policies_of
from phalanx.split.handshake.meeting import EnclaveHandshake
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.transport import CpuMeter


class HandshakeServer:
    """The enclave's side of all handshakes of one session."""

    def __init__(
        self,
        config: EnclaveConfig,
        identity: Identity,
        attester: Attester,
        epochs: EpochSource,
        parties: Mapping[str, Peer],
    ) -> None:
        self._split = split = config.split
        keys = attested_keys(identity.public, identity.certificate_pem)
        terms = HandshakeTerms(
            config.session, bytes.fromhex(config.config_digest), identity.public, keys, split.chunk_bytes
        )
        clients = {
            name: attested_keys(parties[name], config.certificates.get(name, "").encode("ascii"))
            for name in split.client_policies
        }
        self._appraiser = ClientAppraiser(terms, client_policies_of(split), clients)
        self._handshake = EnclaveHandshake(identity, attester, terms, epochs, parties, self._appraiser)
        self._meter = CpuMeter()

    @property
    def meeting_seconds(self) -> float:
        """CPU time of handshakes so far."""
        return self._meter.cpu_seconds("meeting")

    def make_evidence_reply(self, party: str, message: say.EvidenceRequest) -> tuple[say.EvidenceReply, bytes]:
        """Return evidence for a party's nonce, and the nonce for its own where the run file has a policy for it."""
        with self._meter.measure_cpu_time("meeting"):
            evidence = self._handshake.enclave_evidence(party, bytes.fromhex(message.nonce))
            nonce = self._handshake.draw_client_nonce(party)
        return say.EvidenceReply(nonce=None if nonce is None else nonce.hex()), evidence

    def admit_party(self, party: str, message: say.HandshakeCall, payload: memoryview) -> tuple[bytes, FrameLink]:
        """Return the reply to a party's call, and the link to it.

        Raises:
            RefusedEvidenceError: Its word on this enclave, or its own evidence, does not pass.
            SealError: Its hello is about something else.
        """
        if self._split.mode == "plaintext":
            return b"", PlainLink()
        hello_at = message.token_bytes + message.evidence_bytes
        token, evidence = bytes(payload[: message.token_bytes]), bytes(payload[message.token_bytes : hello_at])
        with self._meter.measure_cpu_time("meeting"):
            return self._handshake.admit_client(party, token, bytes(payload[hello_at:]), evidence)

    def appraise_again(self, client: str, payload: memoryview) -> None:
        """Appraise new evidence of a client."""
        with self._meter.measure_cpu_time("meeting"):
            self._appraiser.appraise_client(client, bytes(payload))

    def require_renewal(self, turn: ask.ClientTurn) -> None:
        """Have clients bring new evidence before they send anything, where the last one is too old for a turn."""
        now = turn.what == "train" and self._split.reattests_at(turn.step)
        self._appraiser.require_renewal(now=now, every_s=self._split.reattest_s)

    def check_client(self, client: str) -> None:
        """Return where a client's tensors may be taken."""
        self._appraiser.check_appraised(client)

    def pop_appraisal_messages(self) -> Iterator[SplitMessage]:
        """What the owner is to be told of clients' evidence, once."""
        for appraisal in self._appraiser.pop_appraisals():
            if appraisal.result is None:
                yield ask.ClientEvidenceRefused(client=appraisal.client, reason=appraisal.reason)
                continue
            claims = appraisal.result.claims
            yield ask.ClientAppraised(
                client=appraisal.client,
                evidence=claims.kind,
                policy=digest_config(self._split.client_policies[appraisal.client]),
                device=claims.device[:500],
                measurements=dict(claims.measurements),
            )
