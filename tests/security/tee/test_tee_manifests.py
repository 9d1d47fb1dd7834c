"""NVIDIA's signed manifests: a published one, and a test's own in every form in which they can be wrong."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from authority import Form, issue, p384
from hypothesis import given
from hypothesis import strategies as st
from nvidia import BLOCKS, Nvidia
from nvidia_manifests import DRIVER, FIRMWARE, Signer, document, measured, resource
from published import VECTORS
from refusals import refusal

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.xml_tree import canonical_xml, parse_xml
from phalanx.security.tee.nvidia.manifest import read_manifest
from phalanx.security.tee.policy import _read_packaged

PUBLISHED = VECTORS / "nvidia" / "1010_0200_882_960074001A_PROD.swidtag"
published = pytest.mark.skipif(not PUBLISHED.is_file(), reason=f"{PUBLISHED} is not there")
OTHER = "5a" * 48


@pytest.fixture(scope="module")
def signer():
    return Signer()


@pytest.fixture(scope="module")
def gpu():
    return Nvidia()


def case_of(gpu, signer, binding, sent=None, **changes):
    """Evidence of the test's GPU with manifests, under a policy that asks for them."""
    case = gpu.case(binding, **changes).with_reference(require_manifests=True)
    for name, data in (signer.pair() if sent is None else sent).items():
        case = case.with_endorsement(name, data)
    return case.with_policy(manifest_roots={"nv-gpu": (signer.root.parsed,)})


def vendors_trust(year: int) -> Trust:
    return Trust(_read_packaged(("nvidia_manifests.pem",)), datetime(year, 6, 1, tzinfo=UTC))


@published
def test_a_published_manifest_is_read():
    manifest = read_manifest(PUBLISHED.read_bytes(), vendors_trust(2024), "vbios_rim")

    assert manifest.version == "96.00.74.00.1A"
    assert len(manifest.values) == 12
    assert len(manifest.values[13]) == 4
    assert 8 not in manifest.values


@published
def test_a_published_manifest_ends_with_its_signers_certificate():
    assert refusal(lambda: read_manifest(PUBLISHED.read_bytes(), vendors_trust(2026), "vbios_rim")) == "expired"


@published
def test_a_published_manifest_cannot_be_altered():
    data = PUBLISHED.read_bytes()
    end = data.index(b"<ds:KeyInfo>")

    for position in range(0, end, 151):
        altered = bytearray(data)
        altered[position] ^= 1
        assert refusal(lambda altered=altered: read_manifest(bytes(altered), vendors_trust(2024), "vbios_rim"))


def test_a_gpu_that_measures_what_its_manifests_say_passes(gpu, signer, binding):
    result = case_of(gpu, signer, binding).appraise()

    assert not any("RIM" in note for note in result.claims.notes)


def test_without_manifests_the_result_says_so_and_a_policy_can_ask_for_them(gpu, signer, binding):
    case = gpu.case(binding)

    assert any("RIM" in note for note in case.appraise().claims.notes)
    assert refusal(case_of(gpu, signer, binding, {}).appraise) == "missing_endorsement"
    alone = {"driver_rim": signer.pair()["driver_rim"]}
    assert refusal(case_of(gpu, signer, binding, alone).appraise) == "missing_endorsement"
    assert refusal(case.with_endorsement("vbios_rim", signer.pair()["vbios_rim"]).appraise) == "missing_endorsement"


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_a_gpu_that_measures_something_else_is_refused(gpu, signer, binding, block):
    case = case_of(gpu, signer, binding, blocks={**BLOCKS, block: b"\x66" * 48})
    # the policy's own value would refuse it too
    case = case.with_reference(measurements={"5": (BLOCKS[5].hex(),)})

    assert refusal(case.appraise) == "wrong_measurement"


def test_a_measurement_that_is_absent_is_refused_and_an_inactive_one_is_not_looked_at(gpu, signer, binding):
    absent = {"firmware": document(FIRMWARE, measured(3) + resource(40, OTHER))}
    idle = {"firmware": document(FIRMWARE, measured(3) + resource(40, OTHER, active="False"))}

    assert refusal(case_of(gpu, signer, binding, signer.pair(**absent)).appraise) == "wrong_measurement"
    assert case_of(gpu, signer, binding, signer.pair(**idle)).appraise()


def test_any_of_several_values_passes(gpu, signer, binding):
    several = {"firmware": document(FIRMWARE, resource(2, OTHER, BLOCKS[3].hex(), "00" * 48))}

    assert case_of(gpu, signer, binding, signer.pair(**several)).appraise()


@pytest.mark.parametrize(
    "sent",
    [
        {"driver": document("575.01.03", measured(1))},
        {"firmware": document("96.00.9F.00.02", measured(3))},
        {"driver": document(FIRMWARE, measured(1)), "firmware": document(DRIVER, measured(3))},
    ],
)
def test_manifests_of_other_versions_are_refused(gpu, signer, binding, sent):
    assert refusal(case_of(gpu, signer, binding, signer.pair(**sent)).appraise) == "wrong_measurement"


def test_manifests_that_speak_of_one_measurement_both_are_refused(gpu, signer, binding):
    sent = signer.pair(firmware=document(FIRMWARE, measured(2, 3)))

    assert refusal(case_of(gpu, signer, binding, sent).appraise) == "malformed"


def test_a_gpus_key_does_not_sign_manifests_nor_the_other_way_round(gpu, signer, binding):
    by_gpu = signer.sign(document(DRIVER, measured(1, 2)), signer=gpu.leaf)
    sent = {**signer.pair(), "driver_rim": by_gpu}
    forged = Nvidia()
    forged.leaf = signer.leaf
    case = case_of(gpu, signer, binding)
    report = forged.report(binding.binding_digest())
    chain = signer.leaf.pem + signer.root.pem

    assert refusal(case_of(gpu, signer, binding, sent).appraise) == "bad_chain"
    assert refusal(case.with_data(report).with_endorsement("chain", chain).appraise) == "bad_chain"


def test_a_signer_below_no_pinned_root_or_without_the_right_is_refused(signer):
    text = document(DRIVER, measured(1))
    stranger = issue("Test RIM Signer", p384(), issue("Test CoRIM signing Root CA", p384()), Form())
    authority = issue("Test RIM Signer", p384(), signer.root, Form(is_authority=True))

    for leaf in (stranger, authority):
        assert (
            refusal(lambda leaf=leaf: read_manifest(signer.sign(text, signer=leaf), signer.trust, "rim")) == "bad_chain"
        )


def test_an_ended_signer_is_refused(signer):
    data = signer.sign(document(DRIVER, measured(1)))
    later = replace(signer.trust, now=datetime(2090, 1, 1, tzinfo=UTC))

    assert refusal(lambda: read_manifest(data, later, "rim")) == "expired"


@pytest.mark.parametrize(
    "change",
    [
        {"FORM": "http://www.w3.org/2001/10/xml-exc-c14n#"},
        {"METHOD": "http://www.w3.org/2000/09/xmldsig#rsa-sha1"},
        {"HASH": "http://www.w3.org/2000/09/xmldsig#sha1"},
        {"URI": "#part"},
        {"ENVELOPED": "http://www.w3.org/TR/1999/REC-xslt-19991116"},
    ],
)
def test_another_form_of_signature_is_refused(signer, change):
    data = signer.sign(document(DRIVER, measured(1)), **change)

    assert refusal(lambda: read_manifest(data, signer.trust, "rim")) == "malformed"


def test_a_signed_document_that_is_wrapped_into_another_is_refused(signer):
    genuine = signer.sign(document(DRIVER, measured(1))).decode()
    evil = document(DRIVER, resource(0, OTHER), end=f"{genuine}</SoftwareIdentity>")
    moved = genuine.replace(BLOCKS[1].hex(), OTHER)
    signature = genuine[genuine.index("<ds:Signature") : genuine.index("</SoftwareIdentity>")]
    twice = genuine.replace("</SoftwareIdentity>", f"{signature}</SoftwareIdentity>")
    first = genuine.replace(signature, "").replace("<n:Entity", f"{signature}<n:Entity", 1)

    for data, reason in ((evil, "malformed"), (moved, "bad_signature"), (twice, "malformed"), (first, "malformed")):
        assert refusal(lambda data=data: read_manifest(data.encode(), signer.trust, "rim")) == reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no xml",
        "<a>",
        "<a></b>",
        "<a/><b/>",
        '<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>',
        "<!DOCTYPE a><a/>",
        "<a><!-- hidden --></a>",
        "<a><?run it?></a>",
        "<a><![CDATA[x]]></a>",
        "<p:a/>",
        '<a xmlns:p=""/>',
        '<a xmlns:p="u" xmlns:q="u" p:x="1" q:x="2"/>',
        '<a xml:lang="en"/>',
        "<a>&amp</a>",
        "<a>" * 20 + "</a>" * 20,
        "<a>" + "<b/>" * 5000 + "</a>",
    ],
)
def test_xml_that_two_readers_could_see_differently_is_refused(text):
    assert refusal(lambda: parse_xml(text.encode(), "test")) == "malformed"


@given(st.one_of(st.binary(max_size=200), st.text(alphabet="<>/a:=\"' &;#x!?-[]\n\0", max_size=80).map(str.encode)))
def test_any_bytes_at_all_are_a_document_or_refused(data):
    try:
        root = parse_xml(data, "test")
    except RefusedEvidenceError as exc:
        assert exc.reason == "malformed"
    else:
        # what was read is written in one form, which is read as the same
        assert canonical_xml(parse_xml(canonical_xml(root), "test")) == canonical_xml(root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<a/>", "<a></a>"),
        ("<a  z='1'   b=\"2\" />", '<a b="2" z="1"></a>'),
        ('<a xmlns:z="u" xmlns:b="v" xmlns="w"/>', '<a xmlns="w" xmlns:b="v" xmlns:z="u"></a>'),
        ('<a xmlns:z="a" xmlns:b="z" b:x="1" z:y="2" c="3"/>', None),
        ('<a xmlns="u"><b xmlns="u"/></a>', '<a xmlns="u"><b></b></a>'),
        ('<a xmlns="u"><b xmlns=""/></a>', '<a xmlns="u"><b xmlns=""></b></a>'),
        ("<a>x &gt; y &amp; &lt;&#13;\r\n</a>", "<a>x &gt; y &amp; &lt;&#xD;\n</a>"),
        ('<a b="&lt;&gt;&quot;&#9;&#10;&#13;&amp;"/>', '<a b="&lt;>&quot;&#x9;&#xA;&#xD;&amp;"></a>'),
        ("<a>\n <b> </b>\n</a>", "<a>\n <b> </b>\n</a>"),
        ("<?xml version='1.0' encoding='UTF-8'?>\n<a>ä</a>\n", "<a>ä</a>"),
    ],
)
def test_the_canonical_form(text, expected):
    if expected is None:
        expected = '<a xmlns:b="z" xmlns:z="a" c="3" z:y="2" b:x="1"></a>'

    assert canonical_xml(parse_xml(text.encode(), "test")).decode() == expected


def test_a_part_carries_the_namespaces_that_are_in_scope():
    root = parse_xml(b'<a xmlns:p="u" xmlns="d"><b><p:c/></b></a>', "test")

    assert canonical_xml(root.child_elements[0]) == b'<b xmlns="d" xmlns:p="u"><p:c></p:c></b>'


@pytest.mark.parametrize(
    "resources",
    [
        "",
        resource(0, OTHER, active="False"),
        resource(0, OTHER) + resource(0, OTHER),
        resource(0, "5A" * 48),
        resource(0, "5a" * 32),
        resource(300, OTHER),
        resource(0, OTHER).replace('index="0"', 'index="-1"'),
        resource(0, OTHER).replace('index="0"', 'index="²"'),
        resource(0, OTHER).replace('alternatives="1"', 'alternatives="2"'),
        resource(0, OTHER).replace('alternatives="1"', 'alternatives="0"'),
        resource(0, OTHER).replace('active="True"', 'active="true"'),
        resource(0, OTHER).replace('type="Measurement"', 'type="Other"'),
        "<n:File/>",
    ],
)
def test_a_manifest_that_is_signed_and_malformed_is_refused(signer, resources):
    data = signer.sign(document(DRIVER, resources))

    assert refusal(lambda: read_manifest(data, signer.trust, "rim")) == "malformed"


def test_the_decoders_measurement_counts_only_where_the_decoder_is_on(signer):
    from types import SimpleNamespace

    from phalanx.security.tee.nvidia.manifest import ReferenceManifest, check_manifests

    driver = ReferenceManifest(DRIVER, {36: frozenset({OTHER})}, ())
    firmware = ReferenceManifest(FIRMWARE, {1: frozenset({OTHER})}, ())
    report = SimpleNamespace(
        driver_version=DRIVER, vbios_version=FIRMWARE, measurements={1: bytes.fromhex(OTHER)}, is_decoder_off=True
    )

    check_manifests(report, driver, firmware)
    report.is_decoder_off = False
    assert refusal(lambda: check_manifests(report, driver, firmware)) == "wrong_measurement"
