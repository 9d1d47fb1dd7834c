"""The reasons of refused evidence: one word each, so that a program can tell a stale report from a forged one."""

from enum import StrEnum


class RefusedEvidenceReason(StrEnum):
    """Every reason for which appraisal refuses; the values appear in messages, JSON and the audit log."""

    UNKNOWN_KIND = "unknown_kind"
    INSECURE_KIND = "insecure_kind"
    MALFORMED = "malformed"
    MISSING_EVIDENCE = "missing_evidence"
    MISSING_ENDORSEMENT = "missing_endorsement"
    NO_REFERENCE = "no_reference"
    NO_ROOT = "no_root"
    BAD_SIGNATURE = "bad_signature"
    BAD_CHAIN = "bad_chain"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    REVOKED = "revoked"
    WRONG_SIGNER = "wrong_signer"
    WRONG_NONCE = "wrong_nonce"
    WRONG_KEY = "wrong_key"
    WRONG_RUN = "wrong_run"
    WRONG_ROLE = "wrong_role"
    WRONG_BINDING = "wrong_binding"
    WRONG_MEASUREMENT = "wrong_measurement"
    TCB_TOO_OLD = "tcb_too_old"
    DEBUG_ENABLED = "debug_enabled"
    FORBIDDEN_MODE = "forbidden_mode"
