"""The messages to an aggregator in an enclave: its evidence, and updates that are sealed for the key in it."""

import hashlib
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import AggregationError, RefusedEvidenceError
from phalanx.federated.config import EnclaveSumsConfig
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import SEAL_PUBLIC_BYTES, digest_hex, in_domain, steady_now
from phalanx.security.tee import Binding, Policy, Verifier, parse_evidence
from phalanx.split.config import SplitConfig
from phalanx.split.hardware.measure import policy_of

ROLE = "aggregator"
KEY_BYTES = SEAL_PUBLIC_BYTES
SEAL = "aggregator-seal/1"
"""Purpose of a sealed update."""


def bound_terms(terms: RunTerms) -> bytes:
    """Return the digest of everything that an aggregator's word rests on, 32 bytes.

    A host that gives it a smaller cohort, another rule or other sites' keys has evidence that no site accepts.
    """
    facts: dict[str, Any] = {
        "run": terms.digest,
        "section": terms.config.model_dump(mode="json"),
        "roster": {name: peer.public_key.hex() for name, peer in sorted(terms.roster.items())},
    }
    return bytes.fromhex(digest_hex(in_domain("aggregator-terms/1", canonical_json(facts))))


def binding_of(terms: RunTerms, public: bytes, nonce: bytes) -> Binding:
    """Return what evidence is bound to: a site's nonce, the aggregator's key, and the run's terms."""
    return Binding(nonce, hashlib.sha256(in_domain("aggregator-key/1", public)).digest(), bound_terms(terms), ROLE)


def as_split_config(config: EnclaveSumsConfig) -> SplitConfig:
    """Return the config as tiers of a split read it: there is one list of tiers."""
    return SplitConfig(
        cut=1,
        tier=config.tier,
        tpm=config.tpm,
        endorsements=config.endorsements,
        policy=config.policy,
        allow_insecure_sim=config.allow_insecure_sim,
    )


class AggregatorAppraisal:
    """A site's appraisal of the aggregator that its update is to go to.

    Guarantees:
        A key is returned for the nonce that was drawn last, once, if evidence that the policy accepts binds it to
        these terms.
    """

    def __init__(self, terms: RunTerms) -> None:
        self._terms = terms
        self._asked: tuple[Verifier, bytes] | None = None

    def draw_nonce(self) -> bytes:
        """Draw the nonce of the next appraisal, by the policy as it is now."""
        verifier = Verifier(self._read_policy())
        nonce = verifier.new_nonce(steady_now())
        self._asked = (verifier, nonce)
        return nonce

    def appraise_key(self, payload: bytes) -> bytes:
        """Return the public key of an aggregator, from its key and evidence."""
        if self._asked is None or len(payload) < KEY_BYTES:
            raise AggregationError(SumRefusal.OUT_OF_PHASE, "aggregator: unexpected evidence")
        (verifier, nonce), self._asked = self._asked, None
        public, evidence = payload[:KEY_BYTES], payload[KEY_BYTES:]
        try:
            verifier.appraise_evidence(parse_evidence(evidence), binding_of(self._terms, public, nonce), steady_now())
        except RefusedEvidenceError as exc:
            raise AggregationError(SumRefusal.FOREIGN_PARTY, f"aggregator: {exc}") from exc
        return public

    def _read_policy(self) -> Policy:
        config = self._terms.config.enclave
        policy = config.policy
        return policy_of(
            as_split_config(config if policy is None else config.model_copy(update={"policy": str(Path(policy))}))
        )
