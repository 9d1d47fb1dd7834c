"""A confidential VM of Azure: the chip vouches for the vTPM's key, and every byte of the chain counts."""

import base64
import hashlib
import json
import random
import struct
from dataclasses import replace

import pytest
from amd import Amd
from cryptography.hazmat.primitives.asymmetric import rsa
from published import Case, az_snp_vtpm
from pydantic import ValidationError
from refusals import refusal
from tcg import PCRS, Tpm, pcr_values

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee import Evidence, Policy
from phalanx.security.tee.azure.vtpm import AzSnpVtpmReference


def runtime_data(ak, **changes) -> bytes:
    number = ak.public_key().public_numbers().n.to_bytes(256, "big")
    key = {"kid": "HCLAkPub", "key_ops": ["sign"], "kty": "RSA", "e": "AQAB"}
    key["n"] = base64.urlsafe_b64encode(number).decode().rstrip("=")
    return json.dumps({"keys": [{**key, **changes}], "user-data": "00"}).encode()


def hcl_report(hardware: bytes, runtime: bytes) -> bytes:
    size = 20 + len(runtime)
    head = b"HCLA" + struct.pack("<III", 1, 32 + 1184 + size, 2) + bytes(16)
    return (head + hardware + struct.pack("<5I", size, 1, 2, 1, len(runtime)) + runtime).ljust(2600, b"\0")


def own_case(binding, *, signer: Tpm | None = None, vouched: bytes | None = None, runtime=None, **report) -> Case:
    """Evidence of a machine of the test's own, and the policy that it must pass."""
    amd, tpm = Amd(), Tpm("rsa")
    runtime = runtime or runtime_data(tpm.ak)
    data = hashlib.sha256(vouched or runtime).digest().ljust(64, b"\0")
    case = amd.case(binding, amd.report(binding, report_data=data, **report))
    parts = {
        **case.evidence.endorsements,
        "hcl_report": hcl_report(case.evidence.data, runtime),
        "pcrs": pcr_values(PCRS),
    }
    evidence = Evidence("az-snp-vtpm", (signer or tpm).quote(binding.binding_digest()), parts, binding)
    known = case.policy.references["snp"]
    values = {**known.measurements, "sha256.7": (PCRS[7].hex(),)}
    reference = AzSnpVtpmReference(measurements=values, min_tcb=known.min_tcb)
    policy = Policy({"az-snp-vtpm": reference}, {"az-snp-vtpm": case.policy.roots["snp"]})
    return Case(evidence, policy, binding, case.now)


def test_a_machine_whose_chip_vouches_for_the_key_that_signed_the_binding_passes(binding):
    result = own_case(binding).appraise()

    assert result.binding == binding
    assert result.claims.measurements["sha256.7"] == PCRS[7].hex()
    assert "rests on the paravisor" in result.claims.notes[-1]


def test_a_quote_of_another_tpm_is_refused_beside_a_genuine_hardware_report(binding):
    class Stranger(Tpm):
        def __post_init__(self):
            super().__post_init__()
            self.ak = rsa.generate_private_key(65537, 2048)

    assert refusal(own_case(binding, signer=Stranger("rsa")).appraise) == "bad_signature"


def test_runtime_data_that_the_chip_never_hashed_is_refused_although_its_key_signed(binding):
    genuine = runtime_data(Tpm("rsa").ak, kid="HCLEkPub")

    assert refusal(own_case(binding, vouched=genuine).appraise) == "wrong_signer"


def test_a_report_that_the_guest_had_made_below_the_paravisor_is_refused(binding):
    assert refusal(own_case(binding, vmpl=2).appraise) == "forbidden_mode"


@pytest.mark.parametrize(
    "change", [{"kid": "HCLEkPub"}, {"key_ops": ["encrypt"]}, {"kty": "EC"}, {"n": "AQAB"}, {"n": 1}]
)
def test_a_key_that_is_not_the_vtpms_attestation_key_is_refused(change, binding):
    assert refusal(own_case(binding, runtime=runtime_data(Tpm("rsa").ak, **change)).appraise) == "malformed"


def test_another_binding_or_another_system_above_the_same_paravisor_is_refused(binding):
    case = own_case(binding)
    launch = case.policy.references["az-snp-vtpm"].measurements["launch"]

    assert refusal(replace(case, expected=replace(binding, nonce=b"\x01" * 32)).appraise) == "wrong_nonce"
    other = case.with_reference(measurements={"launch": launch, "sha256.7": ("00" * 32,)})
    assert refusal(other.appraise) == "wrong_measurement"


@pytest.mark.parametrize(
    "change", [{"measurements": {"launch": ("00",)}}, {"measurements": {"sha256.7": ("00",)}}, {"max_vmpl": 2}]
)
def test_a_policy_that_names_half_of_the_machine_or_admits_the_guests_level_cannot_be_written(change, binding):
    with pytest.raises(ValidationError):
        own_case(binding).with_reference(**change)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_no_byte_of_the_published_sample_can_be_altered(stride):
    case, draw, passed = az_snp_vtpm(), random.Random(7), []
    for part in ("hcl_report", "pcrs", "vcek"):
        data = case.evidence.endorsements[part]
        # heads of parts hold sizes, which no signature covers: each of their bytes is altered
        heads = {*range(64), *range(1200, 1280)} if part == "hcl_report" else set()
        for place in sorted({*range(0, len(data), stride)} | heads):
            changed = data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
            try:
                case.with_endorsement(part, changed).appraise()
            except RefusedEvidenceError:
                continue
            passed.append((part, place))

    assert passed == []
