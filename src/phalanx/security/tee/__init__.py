"""Attestation in the roles of RFC 9334: evidence of trusted hardware, appraised offline against a policy."""

from phalanx.security.tee.amd.derived_key import derive_guest_key as derive_guest_key
from phalanx.security.tee.appraisal import (
    AppraisalResult as AppraisalResult,
    appraise_evidence as appraise_evidence,
    appraise_together as appraise_together,
)
from phalanx.security.tee.attesters import (
    ATTESTED_KINDS as ATTESTED_KINDS,
    find_kind as find_kind,
    open_attester as open_attester,
)
from phalanx.security.tee.azure.attester import AzureAttester as AzureAttester
from phalanx.security.tee.backends import BACKENDS as BACKENDS, inspect_evidence as inspect_evidence
from phalanx.security.tee.binding import (
    Binding as Binding,
    Expected as Expected,
    RawReportData as RawReportData,
)
from phalanx.security.tee.claims import (
    Claims as Claims,
    Reference as Reference,
    check_measurements as check_measurements,
)
from phalanx.security.tee.eat import issue_token as issue_token, read_token as read_token
from phalanx.security.tee.evidence import (
    Evidence as Evidence,
    parse_evidence as parse_evidence,
    read_endorsements as read_endorsements,
)
from phalanx.security.tee.key_release import KeyRelease as KeyRelease
from phalanx.security.tee.nvidia.nvml import has_confidential_gpu as has_confidential_gpu
from phalanx.security.tee.policy import (
    Policy as Policy,
    PolicyConfig as PolicyConfig,
    build_policy as build_policy,
    policy_files as policy_files,
    load_policy as load_policy,
    packaged_roots as packaged_roots,
)
from phalanx.security.tee.ra_tls import (
    appraise_certificate as appraise_certificate,
    make_certificate as make_certificate,
    read_evidence as read_evidence,
    read_tls_key_digest as read_tls_key_digest,
    tls_key_digest as tls_key_digest,
)
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason as RefusedEvidenceReason
from phalanx.security.tee.roles import Attester as Attester, Verifier as Verifier
from phalanx.security.tee.sim import SimAttester as SimAttester, make_sim_evidence as make_sim_evidence
from phalanx.security.tee.tiers import TIERS as TIERS
from phalanx.security.tee.tpm.attester import TpmAttester as TpmAttester
from phalanx.security.tee.tpm.counter import TpmCounter as TpmCounter
from phalanx.security.tee.tpm.device import TpmDevice as TpmDevice, open_tpm as open_tpm
from phalanx.security.tee.tpm.enrol import Enrolment as Enrolment, begin_enrolment as begin_enrolment
from phalanx.security.tee.tpm.sealer import TpmSealer as TpmSealer
