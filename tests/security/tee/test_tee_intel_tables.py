"""Intel's tables and certificates: the level of a platform, and collateral of somebody else or of another day."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from authority import NOW, Form, integer, issue, oid, p256, tlv
from intel import FMSPC, UNTIL, Intel, Tables, raw_signature, sgx_body, tdx_body
from refusals import refusal

from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.intel.dcap_collateral import check_collateral
from phalanx.security.tee.intel.dcap_quote import TdxBody, parse_sgx_body
from phalanx.security.tee.intel.dcap_tcb import (
    Level,
    QeIdentity,
    TcbInfo,
    module_level,
    platform_level,
    quoting_enclave_level,
    tcb_claims,
    worst_level,
)
from phalanx.security.tee.intel.pck import PckFacts, pck_facts

SGX_EXTENSION = "1.2.840.113741.1.13.1"
FACTS = PckFacts(bytes([2] * 16), 11, bytes(2), FMSPC)
BODY = parse_sgx_body(sgx_body(b""))


def tdx(tcb_svn: bytes = b"\x05\x01\x02", *, signer: bytes = bytes(48), attributes: bytes = bytes(8)) -> TdxBody:
    return TdxBody(tcb_svn.ljust(16, b"\0"), signer, attributes, bytes(8), {}, bytes(64))


def tcb_info(*levels: tuple[int, str], **changes) -> TcbInfo:
    """A table with one level per pair of the first SGX component and a status, and changed values."""
    body = json.loads(Tables(tee="TDX").tcb_info())
    form = body["tcbLevels"][0]
    for svn, status in levels:
        tcb = {**form["tcb"], "sgxtcbcomponents": [{"svn": svn}, *form["tcb"]["sgxtcbcomponents"][1:]]}
        body["tcbLevels"].append({**form, "tcb": tcb, "tcbStatus": status, "advisoryIDs": [f"SA-{svn}"]})
    if levels:
        del body["tcbLevels"][0]
    return TcbInfo.model_validate_json(json.dumps(body | changes))


# the level of a platform


def test_the_first_level_that_every_version_reaches_counts():
    table = tcb_info((3, "UpToDate"), (2, "OutOfDate"), (1, "Revoked"))

    assert platform_level(table, FACTS, BODY) == Level("OutOfDate", ("SA-2",))
    newer = replace(FACTS, svns=bytes([3]) + FACTS.svns[1:])
    assert platform_level(table, newer, BODY) == Level("UpToDate", ("SA-3",))
    one_older = replace(FACTS, svns=FACTS.svns[:-1] + b"\x01")
    assert refusal(lambda: platform_level(table, one_older, BODY)) == "tcb_too_old"
    assert refusal(lambda: platform_level(table, replace(FACTS, pce_svn=10), BODY)) == "tcb_too_old"
    assert refusal(lambda: platform_level(tcb_info(tcbLevels=[]), FACTS, BODY)) == "tcb_too_old"


@pytest.mark.parametrize("facts", [replace(FACTS, fmspc=bytes(6)), replace(FACTS, pce_id=b"\0\x01")])
def test_a_table_of_another_platform_is_refused(facts):
    assert refusal(lambda: platform_level(tcb_info(), facts, BODY)) == "wrong_signer"


@pytest.mark.parametrize(
    ("tcb_svn", "is_reached"),
    [(b"\x05\0\x02", True), (b"\x04\0\x02", False), (b"\0\x01\x02", True), (b"\x09\x01\x01", False)],
    ids=["all", "module below", "module by its identity", "third below"],
)
def test_a_trust_domain_reaches_a_level_with_its_own_versions_too(tcb_svn, is_reached):
    if is_reached:
        assert platform_level(tcb_info(), FACTS, tdx(tcb_svn)).status == "UpToDate"
    else:
        assert refusal(lambda: platform_level(tcb_info(), FACTS, tdx(tcb_svn))) == "tcb_too_old"


def test_a_level_without_versions_of_trust_domains_is_none_of_theirs():
    table = TcbInfo.model_validate_json(Tables(tee="SGX").tcb_info())

    assert platform_level(table, FACTS, BODY).status == "UpToDate"
    assert refusal(lambda: platform_level(table, FACTS, tdx())) == "tcb_too_old"


# the TDX module and the quoting enclave


def test_the_module_is_judged_by_the_identity_of_its_version():
    table = tcb_info()

    assert module_level(table, tdx(b"\x03\x01")) == Level("UpToDate")
    assert refusal(lambda: module_level(table, tdx(b"\x02\x01"))) == "tcb_too_old"
    assert module_level(table, tdx(b"\x00\x00")) == Level("UpToDate")
    assert refusal(lambda: module_level(table, tdx(b"\x03\x02"))) == "wrong_signer"
    assert refusal(lambda: module_level(tcb_info(tdxModule=None), tdx(b"\x03\x00"))) == "malformed"


@pytest.mark.parametrize("version", [b"\x03\x00", b"\x03\x01"])
def test_a_module_of_another_signer_or_with_other_attributes_is_refused(version):
    assert refusal(lambda: module_level(tcb_info(), tdx(version, signer=b"\x01" + bytes(47)))) == "wrong_signer"
    assert refusal(lambda: module_level(tcb_info(), tdx(version, attributes=b"\x01" + bytes(7)))) == "forbidden_mode"
    assert refusal(lambda: module_level(tcb_info(), tdx(version, attributes=bytes(7)))) == "forbidden_mode"


QE = {"signer": b"\xdc" * 32, "product": 2, "svn": 4}


def test_the_quoting_enclave_is_the_one_that_intel_describes():
    table = QeIdentity.model_validate_json(Tables().qe_identity())

    assert quoting_enclave_level(table, parse_sgx_body(sgx_body(b"", **QE))) == Level("UpToDate")
    for change in ({"signer": bytes(32)}, {"product": 1}, {"attributes": 0x07}):
        other = parse_sgx_body(sgx_body(b"", **QE | change))
        assert refusal(lambda other=other: quoting_enclave_level(table, other)) == "wrong_signer"
    older = parse_sgx_body(sgx_body(b"", **QE | {"svn": 3}))
    assert refusal(lambda: quoting_enclave_level(table, older)) == "tcb_too_old"


def test_bits_outside_the_mask_are_free_and_a_mask_of_another_length_hides_nothing():
    body = json.loads(Tables().qe_identity())
    debug = parse_sgx_body(sgx_body(b"", **QE, attributes=0x07))

    free = QeIdentity.model_validate_json(json.dumps(body | {"attributesMask": "FD" + "FF" * 15}))
    assert quoting_enclave_level(free, debug).status == "UpToDate"
    short = QeIdentity.model_validate_json(json.dumps(body | {"attributesMask": "FD"}))
    assert refusal(lambda: quoting_enclave_level(short, debug)) == "wrong_signer"


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (("UpToDate", "UpToDate"), "UpToDate"),
        (("UpToDate", "SWHardeningNeeded"), "SWHardeningNeeded"),
        (("SWHardeningNeeded", "UpToDate"), "SWHardeningNeeded"),
        (("UpToDate", "OutOfDate", "UpToDate"), "OutOfDate"),
        (("ConfigurationNeeded", "OutOfDate"), "OutOfDateConfigurationNeeded"),
        (("SWHardeningNeeded", "OutOfDateConfigurationNeeded"), "OutOfDate"),
        (("Revoked", "UpToDate"), "Revoked"),
        (("UpToDate", "OutOfDate", "Revoked"), "Revoked"),
    ],
)
def test_the_worst_of_platform_module_and_enclave_counts(statuses, status):
    assert worst_level([Level(name) for name in statuses]).status == status


def test_advisories_of_all_levels_stand_once_in_their_order():
    level = worst_level([Level("UpToDate", ("b", "a")), Level("UpToDate", ("a", "c"))])

    assert tcb_claims(level, 17) == {"status": "UpToDate", "advisories": "b a c", "evaluation": 17}


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"id": "SEV"}, {"fmspc": "0g"}, {"tcbEvaluationDataNumber": -1}, {"fmspc": "00" * 65}],
)
def test_a_table_of_another_form_is_no_table(change):
    with pytest.raises(ValueError, match="validation error"):
        tcb_info(**change)


def test_a_level_has_sixteen_versions_of_one_byte_each():
    for components in ([{"svn": 2}] * 15, [{"svn": 2}] * 15 + [{"svn": 256}], [{"svn": 2}] * 17):
        level = {"tcb": {"sgxtcbcomponents": components, "pcesvn": 11}, "tcbStatus": "UpToDate"}
        with pytest.raises(ValueError, match="validation error"):
            tcb_info(tcbLevels=[level])


# the PCK certificate


def pair(name: str, value: bytes) -> bytes:
    return tlv(0x30, oid(f"{SGX_EXTENSION}{name}"), value)


def platform(**changes: bytes) -> tuple[bytes, ...]:
    """Fields of the SGX extension by the number of their identifier; an empty value leaves the field out."""
    parts = [pair(f".2.{index}", integer(index)) for index in range(1, 17)] + [pair(".2.17", integer(300))]
    fields = {
        "2": pair(".2", tlv(0x30, *parts)),
        "3": pair(".3", tlv(4, b"\0\x01")),
        "4": pair(".4", tlv(4, FMSPC)),
        "5": pair(".5", tlv(0x0A, b"\x01")),
    }
    return tuple(value for value in (fields | {name[1:]: value for name, value in changes.items()}).values() if value)


def certified(extension: bytes | None) -> PckFacts:
    extensions = () if extension is None else ((SGX_EXTENSION, extension),)
    return pck_facts(issue("PCK", KEY, AUTHORITY, Form(extensions=extensions)).parsed)


KEY, AUTHORITY = p256(), issue("CA", p256())


def test_a_pck_certificate_names_its_platform():
    assert certified(tlv(0x30, *platform())) == PckFacts(bytes(range(1, 17)), 300, b"\0\x01", FMSPC)


@pytest.mark.parametrize(
    "extension",
    [
        None,
        tlv(0x30),
        tlv(0x30, *platform(_2=b"")),
        tlv(0x30, *platform(_3=b"")),
        tlv(0x30, *platform(_5=b"")),
        tlv(0x30, *platform(_3=pair(".3", tlv(4, bytes(3))))),
        tlv(0x30, *platform(_4=pair(".4", tlv(4, bytes(5))))),
        tlv(0x30, *platform(_4=pair(".4", integer(1)))),
        tlv(0x30, *platform(_2=pair(".2", tlv(0x30, pair(".2.1", integer(1)))))),
        tlv(
            0x30,
            *platform(
                _2=pair(".2", tlv(0x30, *(pair(f".2.{index}", integer(256)) for index in range(1, 18)))),
            ),
        ),
        tlv(0x30, *platform(), pair(".3", tlv(4, bytes(2)))),
        tlv(0x30, tlv(0x30, integer(1), integer(2))),
        tlv(0x30, *platform()) + b"\0",
        tlv(0x30, tlv(0x30, oid(f"{SGX_EXTENSION}.3"), tlv(4, bytes(2)), tlv(0x05)), *platform(_3=b"")),
    ],
    ids=["absent", "empty", "no versions", "no PCE id", "no type", "long PCE id", "short FMSPC", "FMSPC a number",
         "one version", "version above a byte", "field twice", "no identifier", "trailing byte", "three parts"],
)  # fmt: skip
def test_a_pck_certificate_without_one_sound_platform_is_refused(extension):
    assert refusal(lambda: certified(extension)) == "malformed"


# collateral


@pytest.fixture(scope="module")
def intel():
    return Intel()


def check(intel: Intel, parts: dict, now=NOW):
    return check_collateral(json.dumps(parts).encode(), Trust((intel.root.parsed,), now))


def signed(intel: Intel, tables: Tables, key=None, **texts: str) -> dict[str, str]:
    """Collateral in which some texts are replaced and signed by Intel's key, or by another one."""
    parts = intel.collateral(tables)
    for name, text in texts.items():
        signature = raw_signature(key or intel.signer.key, text.encode()).hex()
        parts |= {name: text, f"{name}_signature": signature}
    return parts


def test_sound_collateral_lasts_to_the_end_of_what_ends_first(intel):
    collateral = check(intel, intel.collateral(Tables()))

    assert (collateral.tcb_info.id, collateral.qe_identity.id) == ("TDX", "TD_QE")
    assert collateral.expires.strftime("%Y-%m-%dT%H:%M:%SZ") == UNTIL
    assert collateral.trust.require_crl
    assert collateral.trust.crls == collateral.lists
    assert collateral.pck_chain is None
    assert check(intel, intel.collateral(Tables()) | {"pck_certificate_chain": "text"}).pck_chain == b"text"
    assert check(intel, intel.collateral(Tables()) | {"pck_certificate_chain": None}).pck_chain is None


@pytest.mark.parametrize(
    "change",
    [{"tcb_info": None}, {"unknown": "x"}, {"pck_crl": "0g"}, {"pck_crl": "00"}, {"root_ca_crl": 1},
     {"tcb_info_signature": "00"}, {"tcb_info_signature": "00" * 65}, {"qe_identity_signature": "zz"},
     {"qe_identity": "\ud800"}, {"pck_certificate_chain": 7}],
    ids=["null", "unknown", "no hex", "no list", "number", "short signature", "long signature", "signature no hex",
         "half of a surrogate", "chain a number"],
)  # fmt: skip
def test_collateral_of_another_form_is_refused(intel, change):
    assert refusal(lambda: check(intel, intel.collateral(Tables()) | change)) == "malformed"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"tcb_info": "", "tcb_info": ""}', b"[" * 20000, b"\xff"])
def test_collateral_that_is_no_object_of_its_keys_is_refused(intel, data):
    assert refusal(lambda: check_collateral(data, Trust((intel.root.parsed,), NOW))) == "malformed"


@pytest.mark.parametrize("name", ["tcb_info", "qe_identity"])
def test_tables_are_intels_as_they_stand(intel, name):
    tables = Tables()
    text = getattr(tables, name)()

    altered = intel.collateral(tables) | {name: text + " "}
    assert refusal(lambda: check(intel, altered)) == "bad_signature"
    stranger = signed(intel, tables, p256(), **{name: text})
    assert refusal(lambda: check(intel, stranger)) == "bad_signature"
    double = signed(intel, tables, **{name: text[:-1] + ',"version":3}'})
    assert refusal(lambda: check(intel, double)) == "malformed"
    undated = signed(intel, tables, **{name: text.replace("2026-06-20T00:00:00Z", "2026-06-20")})
    assert refusal(lambda: check(intel, undated)) == "malformed"


def test_a_table_that_another_certificate_of_intel_signed_is_refused(intel):
    other = issue("Intel SGX Other", p256(), intel.root, Form())
    parts = signed(intel, Tables(), other.key, tcb_info=Tables().tcb_info())
    parts["tcb_info_issuer_chain"] = (other.pem + intel.root.pem).decode()

    assert refusal(lambda: check(intel, parts)) == "wrong_signer"


def test_tables_count_from_their_issue_to_their_end(intel):
    parts = intel.collateral(Tables(since="2026-05-20T00:00:00Z"))
    issued, due = NOW.replace(month=5, day=20), NOW.replace(day=20)

    for moment in (issued, due):
        assert check(intel, parts, moment)
    assert refusal(lambda: check(intel, parts, issued - timedelta(seconds=1))) == "not_yet_valid"
    assert refusal(lambda: check(intel, parts, due + timedelta(seconds=1))) == "expired"


def test_a_signer_that_was_revoked_is_refused(intel):
    parts = intel.collateral(Tables()) | {"root_ca_crl": intel.root.crl(intel.signer.parsed.serial).hex()}

    assert refusal(lambda: check(intel, parts)) == "revoked"


def test_a_body_of_a_trust_domain_is_the_one_that_levels_judge(intel, binding):
    assert intel.case(binding, 4, tdx_body(binding.binding_digest())).appraise()
