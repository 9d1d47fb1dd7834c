"""A party outside the enclave: its connection, its appraisal of the enclave, and the link that it agreed on."""

import time
from collections.abc import Callable

from phalanx.errors import PeerRefusedError
from phalanx.security.crypto import Identity, Peer, steady_now
from phalanx.security.seal import compare_statements, read_statement
from phalanx.security.tee import AppraisalResult
from phalanx.split.channel import messages as say
from phalanx.split.channel.connection import Connection
from phalanx.split.channel.link import FrameLink, PlainLink
from phalanx.split.handshake.meeting import ClientHandshake


class EnclavePeer:
    """A client, or the owner."""

    def __init__(
        self,
        identity: Identity,
        line: Connection,
        handshake: ClientHandshake | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.connection = identity.name, line
        self._identity, self._handshake, self._clock = identity, handshake, clock
        self.meeting_s = 0.0
        self._link: FrameLink | None = None
        self._appraised_at = clock()

    @property
    def tensor_link(self) -> FrameLink:
        """What tensors cross by."""
        if self._link is None:
            raise PeerRefusedError(f"{self.name}: has not met the enclave yet")
        return self._link

    @property
    def latest_appraisal(self) -> AppraisalResult | None:
        """What the latest evidence proved; None in a plaintext split."""
        return None if self._handshake is None else self._handshake.result

    def meet_enclave(self) -> None:
        """Appraise the enclave, be appraised where it asks for that, and agree on keys with the appraised enclave.

        Raises:
            RefusedEvidenceError: Its evidence does not pass, or this party's own does not.
        """
        if self._handshake is None:
            self.connection.request_answer(say.HandshakeCall(token_bytes=0), say.Welcome)
            self._link = PlainLink()
            return
        started = time.thread_time()
        evidence = self._appraise_enclave(self._handshake)
        token, hello = self._handshake.make_hello(evidence)
        call = say.HandshakeCall(token_bytes=len(token), evidence_bytes=len(evidence))
        _, reply = self.connection.request_answer(
            call, say.Welcome, (token, evidence, hello) if evidence else (token, hello)
        )
        self._link = self._handshake.accept_reply(bytes(reply))
        self.meeting_s += time.thread_time() - started

    def appraise_again(self) -> None:
        """Ask for evidence for a new nonce, and appraise it by the policy as it is now; the keys stay.

        Where the enclave asks for evidence of this party as well, it gets new evidence too.

        Raises:
            RefusedEvidenceError: It does not pass: nothing more is sent to this enclave. Or this party's own does not.
        """
        if self._handshake is None:
            return
        started = time.thread_time()
        if evidence := self._appraise_enclave(self._handshake):
            self.connection.request_answer(say.ClientEvidence(), say.ClientEvidenceReply, (evidence,))
        self.meeting_s += time.thread_time() - started

    def check_trust(self, *, every_s: float, now: bool) -> None:
        """Check whether the appraised enclave is still accepted; ask for new evidence when it is due.

        It is due whenever a certificate of the last one has ended, such as a Nitro document's, which lasts three hours.

        Args:
            every_s: Seconds that an appraisal is good for at most; 0 for any.
            now: Whether it is time whatever the clock says.
        """
        if self._handshake is None:
            return
        started = time.thread_time()
        self._handshake.check_still_accepted()
        self.meeting_s += time.thread_time() - started
        result = self._handshake.result
        has_ended = result is not None and steady_now() >= result.claims.expires
        if now or has_ended or (every_s and self._clock() - self._appraised_at >= every_s):
            self.appraise_again()

    def compare_transcripts(self, enclave: Peer) -> tuple[bytes, bytes] | None:
        """Exchange signed statements about the frames that have crossed, and compare them.

        Returns:
            This side's and the enclave's; None where nothing is signed.
        """
        mine = self.tensor_link.signed_statement()
        if not mine:
            return None
        _, payload = self.connection.request_answer(say.StatementRequest(), say.StatementReply)
        theirs = bytes(payload)
        compare_statements(read_statement(mine, self._identity.public), read_statement(theirs, enclave))
        return mine, theirs

    def _appraise_enclave(self, handshake: ClientHandshake) -> bytes:
        """Appraise the enclave, and return this party's own evidence for it; empty where it asks for none."""
        # before the enclave's own clock begins: this party is the first to notice that an appraisal is too old
        asked_at = self._clock()
        request, evidence = self.connection.request_answer(
            say.EvidenceRequest(nonce=handshake.draw_nonce().hex()), say.EvidenceReply
        )
        handshake.appraise_enclave(bytes(evidence))
        self._appraised_at = asked_at
        return b"" if request.nonce is None else handshake.client_evidence(bytes.fromhex(request.nonce))

    def close(self) -> None:
        """Forget keys."""
        if self._link is not None:
            self._link.close()
