"""Freshness and key binding: whatever differs is named, and composite evidence shares one binding."""

from dataclasses import replace

import pytest
from amd import Amd
from aws import Aws
from intel import Intel, sgx_body, tdx_body
from nvidia import Nvidia
from refusals import refusal
from tcg import Tpm

from phalanx.errors import RefusedEvidenceError
from phalanx.security.crypto import Identity
from phalanx.security.tee import Binding, Evidence, Policy, appraise_evidence, appraise_together, make_sim_evidence
from phalanx.security.tee.backends import inspect_evidence
from phalanx.security.tee.sim import SimReference

CODE = b"\x0d" * 32
MAKERS = {
    "snp": lambda binding: Amd().case(binding),
    "tdx": lambda binding: Intel().case(binding, 4, tdx_body(binding.binding_digest())),
    "sgx": lambda binding: Intel().case(binding, 3, sgx_body(binding.binding_digest())),
    "nitro": lambda binding: Aws().case(binding),
    "tpm": lambda binding: Tpm().case(binding),
    "nv-gpu": lambda binding: Nvidia().case(binding),
}
OTHERS = {
    "wrong_nonce": {"nonce": b"\x01" * 32},
    "wrong_key": {"tls_key": b"\x01" * 32},
    "wrong_run": {"run": b"\x01" * 32},
    "wrong_role": {"role": "client"},
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("reason", OTHERS)
def test_what_differs_is_named(kind, reason, binding):
    case = MAKERS[kind](binding)

    assert case.appraise().binding == binding
    assert refusal(replace(case, expected=replace(binding, **OTHERS[reason])).appraise) == reason


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_lie_about_what_was_bound_does_not_pass(kind, change, binding):
    case = MAKERS[kind](binding)
    wanted = replace(binding, **change)
    lying = replace(case, expected=wanted, evidence=replace(case.evidence, statement=wanted))
    silent = replace(case, expected=wanted, evidence=replace(case.evidence, statement=None))

    assert refusal(lying.appraise) == "wrong_binding"
    assert refusal(silent.appraise) == "wrong_binding"


def test_no_two_bindings_have_one_digest(binding):
    variants = [binding, *(replace(binding, **change) for change in OTHERS.values())]
    swapped = Binding(binding.tls_key, binding.nonce, binding.run)

    assert len({one.binding_digest() for one in (*variants, swapped)}) == len(variants) + 1


@pytest.mark.parametrize(
    "change", [{"nonce": b"short"}, {"nonce": bytes(33)}, {"tls_key": b""}, {"run": b""}, {"role": "A role"}], ids=str
)
def test_a_binding_of_another_form_cannot_be_made(change, binding):
    with pytest.raises(ValueError, match="binding"):
        replace(binding, **change)


def test_a_field_with_more_than_the_binding_is_refused(binding):
    amd = Amd()
    report = amd.report(binding, report_data=binding.binding_digest() + b"\x01" * 32)

    assert refusal(amd.case(binding, report).appraise) == "wrong_binding"


def composite(binding):
    nvidia = Nvidia()
    cpu, gpu = Amd().case(binding), nvidia.case(binding)
    policy = Policy({**cpu.policy.references, **gpu.policy.references}, {**cpu.policy.roots, **gpu.policy.roots})
    return cpu, gpu, policy, nvidia


def test_cpu_and_gpu_are_judged_together(binding):
    cpu, gpu, policy, _ = composite(binding)

    results = appraise_together([cpu.evidence, gpu.evidence], ["snp", "nv-gpu"], policy, binding, cpu.now)

    assert [one.claims.kind for one in results] == ["snp", "nv-gpu"]


def test_a_gpu_report_made_for_another_key_is_refused_beside_an_honest_cpu(binding):
    cpu, gpu, policy, nvidia = composite(binding)
    relayed = replace(gpu.evidence, data=nvidia.report(replace(binding, tls_key=b"\x01" * 32).binding_digest()))
    parts = [cpu.evidence, relayed]

    assert refusal(lambda: appraise_together(parts, ["nv-gpu"], policy, binding, cpu.now)) == "wrong_binding"


@pytest.mark.parametrize("chosen", ["cpu alone", "nothing", "twice"])
def test_evidence_that_lacks_a_part_or_has_one_twice_is_refused(chosen, binding):
    cpu, gpu, policy, _ = composite(binding)
    parts = {"cpu alone": [cpu.evidence], "nothing": [], "twice": [gpu.evidence, gpu.evidence]}[chosen]
    required = ["nv-gpu"] if parts else []

    assert refusal(lambda: appraise_together(parts, required, policy, binding, cpu.now)) == "missing_endorsement"


def sim_case(binding, **settings):
    policy = Policy({"sim": SimReference(measurements={"code": (CODE.hex(),)})}, allow_insecure_sim=True)
    evidence = make_sim_evidence(Identity.without_certificate("sim"), CODE, binding, **settings)
    return evidence, policy


def test_simulated_evidence_passes_only_where_the_policy_says_so(binding):
    evidence, policy = sim_case(binding)
    now = Amd().case(binding).now

    assert "NOT SECURE" in appraise_evidence(evidence, policy, binding, now).claims.notes[0]
    strict = replace(policy, allow_insecure_sim=False)
    assert refusal(lambda: appraise_evidence(evidence, strict, binding, now)) == "insecure_kind"


def test_simulated_evidence_is_refused_for_the_same_reasons_as_real_one(binding):
    now = Amd().case(binding).now
    evidence, policy = sim_case(binding)
    debug, _ = sim_case(binding, debug=True)
    other = replace(binding, nonce=b"\x01" * 32)
    forged = replace(evidence, data=evidence.data.replace(CODE.hex().encode(), b"0e" * 32))

    assert refusal(lambda: appraise_evidence(debug, policy, binding, now)) == "debug_enabled"
    assert refusal(lambda: appraise_evidence(evidence, policy, other, now)) == "wrong_nonce"
    assert refusal(lambda: appraise_evidence(forged, policy, binding, now)) == "bad_signature"


def test_an_unknown_kind_is_refused(binding):
    now = Amd().case(binding).now

    assert refusal(lambda: appraise_evidence(Evidence("cca", b""), Policy({}), binding, now)) == "unknown_kind"


def test_evidence_of_a_confidential_vm_of_azure_with_tdx_is_refused_by_name_with_the_reason():
    with pytest.raises(RefusedEvidenceError, match="Azure with TDX, whose hardware report") as said:
        inspect_evidence(Evidence("az-tdx-vtpm", b""))

    assert said.value.reason == "unknown_kind"


def test_a_clock_without_a_time_zone_is_our_own_mistake(binding):
    case = Amd().case(binding)

    with pytest.raises(ValueError, match="time zone"):
        appraise_evidence(case.evidence, case.policy, binding, case.now.replace(tzinfo=None))
