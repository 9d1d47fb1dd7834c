"""The enclave's appraisal of clients: by nonces of its own and the run file's policies, before it takes a tensor."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigError, RefusedEvidenceError
from phalanx.security.crypto import steady_now
from phalanx.security.tee import AppraisalResult, Policy, RefusedEvidenceReason, Verifier, build_policy, parse_evidence
from phalanx.split.config import SplitConfig
from phalanx.split.handshake.terms import HandshakeTerms

_CLOCKS_DIFFER = 1.01
_ON_THE_WAY_S = 1.0
"""A client counts from before the enclave does, so by these it has always noticed first that new evidence is due."""


@dataclass(frozen=True)
class ClientAppraisal:
    """What came of one piece of evidence of a client.

    Attributes:
        result: None where the evidence did not pass.
        reason: Why it did not, one of `RefusedEvidenceReason`; empty where it did.
    """

    client: str
    result: AppraisalResult | None
    reason: str = ""


class ClientAppraiser:
    """The appraiser of clients that must bring evidence.

    Args:
        terms_of_run: The session that evidence is bound to.
        policies: By client; a client without a policy is asked for no evidence.
        keys: Public key of every client with a policy, from `attested_keys`.

    Guarantees:
        A nonce is drawn here, given to one client, and good for one appraisal. `check` refuses a client with a policy
        from which evidence has not come, or was refused, or is due again.
    """

    def __init__(
        self,
        terms_of_run: HandshakeTerms,
        policies: Mapping[str, Policy],
        keys: Mapping[str, bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terms, self._keys, self._clock = terms_of_run, keys, clock
        self._verifiers = {client: Verifier(policy) for client, policy in policies.items()}
        self._asked: dict[str, bytes] = {}
        self._appraised_at: dict[str, float] = {}
        self._new_appraisals: list[ClientAppraisal] = []

    def draw_nonce(self, client: str) -> bytes | None:
        """Draw the nonce for a client's evidence; an earlier nonce is void. None where the client needs no evidence."""
        verifier = self._verifiers.get(client)
        if verifier is None:
            return None
        nonce = self._asked[client] = verifier.new_nonce(steady_now())
        return nonce

    def appraise_client(self, client: str, evidence: bytes) -> None:
        """Appraise a client's evidence for its last nonce, which is used up.

        Args:
            client: The client, as transport and signature have proven it.
            evidence: Empty where the client has sent none.
        """
        verifier = self._verifiers.get(client)
        if verifier is None:
            if evidence:
                raise RefusedEvidenceError(
                    RefusedEvidenceReason.NO_REFERENCE,
                    f"{client}: sent evidence, but the run file has no policy for it",
                )
            return
        self._appraised_at.pop(client, None)
        try:
            result = self._appraise_once(verifier, client, evidence)
        except RefusedEvidenceError as exc:
            self._new_appraisals.append(ClientAppraisal(client, None, exc.reason))
            raise
        self._appraised_at[client] = self._clock()
        self._new_appraisals.append(ClientAppraisal(client, result))

    def require_renewal(self, *, now: bool, every_s: float) -> None:
        """Have clients bring new evidence before they send more, except where the last one is recent enough.

        Args:
            every_s: Seconds that an appraisal is good for; 0 for any.
        """
        oldest = self._clock() - _CLOCKS_DIFFER * every_s - _ON_THE_WAY_S
        due = [
            client for client, appraised_at in self._appraised_at.items() if now or (every_s and appraised_at < oldest)
        ]
        for client in due:
            del self._appraised_at[client]

    def check_appraised(self, client: str) -> None:
        """Return where nothing of a client must be awaited before its tensors are taken."""
        if client in self._verifiers and client not in self._appraised_at:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.MISSING_EVIDENCE, f"{client}: must send accepted evidence first"
            )

    def pop_appraisals(self) -> tuple[ClientAppraisal, ...]:
        """Hand out, once, the results of appraisals so far."""
        appraisals, self._new_appraisals = tuple(self._new_appraisals), []
        return appraisals

    def _appraise_once(self, verifier: Verifier, client: str, evidence: bytes) -> AppraisalResult:
        nonce = self._asked.pop(client, None)
        if nonce is None:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_NONCE, f"{client}: got no nonce; request evidence first"
            )
        if not evidence:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.MISSING_EVIDENCE,
                f"{client}: sent no evidence, but the run file has a policy for it",
            )
        binding = self._terms.client_binding(nonce, self._keys[client])
        return verifier.appraise_evidence(parse_evidence(evidence), binding, steady_now())


def client_policies_of(split: SplitConfig) -> dict[str, Policy]:
    """Return what clients' evidence must pass, as the run file says it."""
    policies: dict[str, Policy] = {}
    for client, config in split.client_policies.items():
        try:
            policies[client] = build_policy(config, Path())
        except ConfigError as exc:
            raise ConfigError(f"split.client_policies.{client}: {exc}") from exc
    return policies
