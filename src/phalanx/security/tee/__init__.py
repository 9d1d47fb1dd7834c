"""Attestation in the roles of RFC 9334: evidence of trusted hardware, appraised offline against a policy."""

from phalanx.security.tee.appraisal import AppraisalResult, appraise, appraise_together
from phalanx.security.tee.attesters import ATTESTED_KINDS, find_kind, open_attester
from phalanx.security.tee.backends import BACKENDS, inspect_evidence
from phalanx.security.tee.binding import NONCE_BYTES, Binding, Expected, RawReportData
from phalanx.security.tee.claims import Backend, Claims, Reference, check_measurements
from phalanx.security.tee.eat import Token, issue_token, read_token
from phalanx.security.tee.evidence import Evidence, parse_evidence
from phalanx.security.tee.key_release import KeyRelease
from phalanx.security.tee.policy import Policy, PolicyConfig, build_policy, files_of, load_policy, packaged_roots
from phalanx.security.tee.ra_tls import (
    appraise_certificate,
    make_certificate,
    read_evidence,
    read_tls_key_digest,
    tls_key_digest,
)
from phalanx.security.tee.refusal_reason import Reason
from phalanx.security.tee.roles import Attester, Verifier
from phalanx.security.tee.sim import SimAttester, make_sim_evidence
from phalanx.security.tee.tiers import TIERS
from phalanx.security.tee.tpm.attester import TpmAttester
from phalanx.security.tee.tpm.counter import TpmCounter
from phalanx.security.tee.tpm.device import TpmDevice, open_tpm
from phalanx.security.tee.tpm.enrol import Enrolment, begin_enrolment
from phalanx.security.tee.tpm.sealer import TpmSealer

__all__ = [
    "ATTESTED_KINDS",
    "BACKENDS",
    "NONCE_BYTES",
    "TIERS",
    "AppraisalResult",
    "Attester",
    "Backend",
    "Binding",
    "Claims",
    "Enrolment",
    "Evidence",
    "Expected",
    "KeyRelease",
    "Policy",
    "PolicyConfig",
    "RawReportData",
    "Reason",
    "Reference",
    "SimAttester",
    "Token",
    "TpmAttester",
    "TpmCounter",
    "TpmDevice",
    "TpmSealer",
    "Verifier",
    "appraise",
    "appraise_certificate",
    "appraise_together",
    "begin_enrolment",
    "build_policy",
    "check_measurements",
    "files_of",
    "find_kind",
    "inspect_evidence",
    "issue_token",
    "load_policy",
    "make_certificate",
    "make_sim_evidence",
    "open_attester",
    "open_tpm",
    "packaged_roots",
    "parse_evidence",
    "read_evidence",
    "read_tls_key_digest",
    "read_token",
    "tls_key_digest",
]
