"""SEV-SNP beyond the samples: other generations, VLEK, other TCB levels, and each thing that is refused."""

from dataclasses import replace
from datetime import timedelta

import pytest
from amd import GOOD_POLICY, TCB, Amd
from authority import NOW, Form, issue, p384
from refusals import refusal

from phalanx.security.tee import packaged_roots
from phalanx.security.tee.formats.x509 import parse_crl

PRODUCTS = ("Milan", "Genoa", "Turin")


@pytest.fixture(scope="module")
def milan():
    return Amd("Milan")


@pytest.mark.parametrize("vlek", [False, True], ids=["vcek", "vlek"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("version", [2, 3, 5])
def test_every_generation_signer_and_version_passes(product, vlek, version, binding):
    amd = Amd(product, vlek)

    result = amd.case(binding, amd.report(binding, version=version)).appraise()

    assert result.claims.tcb["product"] == product
    assert result.claims.tcb["microcode"] == TCB["microcode"]
    assert result.binding == binding


@pytest.mark.parametrize(("family_model"), [(0x19, 0xA0), (0x19, 0x1F)])
def test_relatives_that_the_vendor_certifies_as_genoa_pass(family_model, binding):
    amd = Amd("Genoa")

    assert amd.case(binding, amd.report(binding, family_model=family_model)).appraise()


def test_a_certificate_that_names_siena_is_one_of_genoas(binding):
    amd = Amd("Genoa", named="Siena")

    assert amd.case(binding, amd.report(binding, family_model=(0x19, 0xA0))).appraise().claims.tcb["product"] == "Genoa"


def test_a_report_of_another_generation_than_its_certificate_is_refused(milan, binding):
    report = milan.report(binding, family_model=(0x1A, 0x02))

    assert refusal(milan.case(binding, report).appraise) == "wrong_signer"


@pytest.mark.parametrize("part", ["bootloader", "tee", "snp", "microcode"])
def test_a_version_below_the_floor_is_refused_and_the_floor_itself_passes(milan, part, binding):
    floor = {name: value for name, value in TCB.items() if name != "fmc"}

    assert milan.case(binding, min_tcb=floor).appraise()
    assert refusal(milan.case(binding, min_tcb={**floor, part: floor[part] + 1}).appraise) == "tcb_too_old"


def test_on_turin_the_fmc_has_a_floor_as_well(binding):
    assert refusal(Amd("Turin").case(binding, min_tcb={**TCB, "fmc": 3}).appraise) == "tcb_too_old"


@pytest.mark.parametrize("part", ["bootloader", "tee", "snp", "microcode"])
def test_a_report_with_other_versions_than_its_key_was_made_for_is_refused(milan, part, binding):
    report = milan.report(binding, tcb={**TCB, part: TCB[part] + 1})

    assert refusal(milan.case(binding, report).appraise) == "wrong_signer"


def test_a_report_of_another_chip_is_refused(milan, binding):
    assert refusal(milan.case(binding, milan.report(binding, chip_id=b"\x01" * 64)).appraise) == "wrong_signer"


def test_a_vlek_speaks_for_no_chip(binding):
    amd = Amd(vlek=True)

    assert amd.case(binding, amd.report(binding, chip_id=bytes(64))).appraise().claims.device == ""


def test_a_report_that_hides_its_chip_passes_only_where_the_policy_says_so(milan, binding):
    report = milan.report(binding, chip_id=bytes(64))

    assert refusal(milan.case(binding, report).appraise) == "forbidden_mode"
    assert milan.case(binding, report, allow_masked_chip=True).appraise().claims.device == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": GOOD_POLICY | 1 << 19}, "debug_enabled"),
        ({"policy": GOOD_POLICY | 1 << 18}, "forbidden_mode"),
        ({"policy": 1 << 16}, "malformed"),
        ({"vmpl": 1}, "forbidden_mode"),
        ({"version": 1}, "malformed"),
        ({"version": 6}, "malformed"),
        ({"signing_key": 7}, "bad_signature"),
        ({"signing_key": 1}, "missing_endorsement"),
    ],
)
def test_what_is_signed_and_must_not_be_is_refused(milan, changes, reason, binding):
    assert refusal(milan.case(binding, milan.report(binding, **changes)).appraise) == reason


def test_what_a_policy_allows_passes(milan, binding):
    report = milan.report(binding, policy=GOOD_POLICY | 1 << 18, vmpl=2)

    assert milan.case(binding, report, allow_migration=True, max_vmpl=2).appraise()
    assert refusal(milan.case(binding, allow_smt=False).appraise) == "forbidden_mode"


def test_a_vlek_of_another_cloud_is_refused(binding):
    amd = Amd(vlek=True)

    assert amd.case(binding, csp_ids=("Example Cloud",)).appraise()
    assert refusal(amd.case(binding, csp_ids=("Another Cloud",)).appraise) == "wrong_signer"


def test_a_vcek_in_the_place_of_a_vlek_is_refused(milan, binding):
    case = milan.case(binding, milan.report(binding, signing_key=1))

    assert refusal(case.with_endorsement("vlek", milan.leaf.der).appraise) == "wrong_signer"
    stolen = replace(case.evidence, endorsements={"vlek": milan.leaf.der, "chain": milan.chain})
    assert refusal(replace(case, evidence=stolen).appraise) == "wrong_signer"


def test_a_leaf_by_somebody_else_with_the_vendors_names_is_refused(milan, binding):
    case = milan.case(binding)
    other_ark = issue("ARK-Milan", p384())
    own_ask = issue("SEV-Milan", p384(), other_ark, Form(is_authority=True, path_length=0))
    own_leaf = issue("SEV-VCEK", p384(), own_ask, Form(extensions=milan.extensions()))
    forged = replace(
        case.evidence,
        data=milan.report(binding).signed_by(own_leaf.key),
        endorsements={"vcek": own_leaf.der, "chain": own_ask.pem + other_ark.pem},
    )

    assert replace(case, evidence=forged).with_policy(roots={"snp": (other_ark.parsed,)}).appraise()
    assert refusal(replace(case, evidence=forged).appraise) == "bad_chain"
    below_genuine = replace(forged, endorsements={"vcek": own_leaf.der, "chain": milan.chain})
    assert refusal(replace(case, evidence=below_genuine).appraise) == "bad_chain"
    with_genuine_key = replace(forged, endorsements=case.evidence.endorsements)
    assert refusal(replace(case, evidence=with_genuine_key).appraise) == "bad_signature"


def test_a_revoked_ask_is_refused_and_a_clean_list_passes(milan, binding):
    case = milan.case(binding)
    clean, revoking = milan.ark.crl(), milan.ark.crl(milan.ask.parsed.serial)

    assert case.with_endorsement("crl", clean).appraise().claims.notes == ()
    assert refusal(case.with_endorsement("crl", revoking).appraise) == "revoked"
    assert refusal(case.with_policy(crls={"snp": (parse_crl(revoking),)}).appraise) == "revoked"


def test_an_overdue_or_a_forged_revocation_list_is_refused(milan, binding):
    case, day = milan.case(binding), timedelta(days=1)
    overdue = milan.ark.crl(since=NOW - 2 * day, until=NOW - day)
    early = milan.ark.crl(since=NOW + day, until=NOW + 2 * day)
    forged = issue("ARK-Milan", p384()).crl()

    assert refusal(case.with_endorsement("crl", overdue).appraise) == "expired"
    assert refusal(case.with_endorsement("crl", early).appraise) == "not_yet_valid"
    assert refusal(case.with_endorsement("crl", forged).appraise) in ("bad_signature", "malformed")


def test_a_leaf_that_has_expired_or_not_begun_is_refused(binding):
    day = timedelta(days=1)

    assert refusal(Amd(leaf_form={"until": NOW - day}).case(binding).appraise) == "expired"
    assert refusal(Amd(leaf_form={"since": NOW + day}).case(binding).appraise) == "not_yet_valid"


def test_a_generation_whose_root_is_not_packaged_needs_one_in_the_policy(binding):
    case = Amd("Genoa").case(binding).with_policy(roots={})

    assert [root.subject_name for root in packaged_roots("snp")] == ["ARK-Milan"]
    assert refusal(case.appraise) == "bad_chain"


def test_the_reserved_bytes_of_the_signature_must_be_zero(milan, binding):
    case = milan.case(binding)

    for position in (0x2A0 + 48, 0x2A0 + 71, 0x2A0 + 120, 0x2A0 + 144, 1183):
        data = bytearray(case.evidence.data)
        data[position] = 1
        assert refusal(case.with_data(bytes(data)).appraise) == "malformed"
