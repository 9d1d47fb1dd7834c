"""The binary reports of AMD, Azure, Intel and NVIDIA, field by field; hardware that lies is not in question here."""

import base64
import hashlib
import json
import struct

import pytest
from amd import TCB, Amd, Report, raw_tcb
from authority import p384, rsa_key
from intel import Intel, sgx_body, tdx_body
from nvidia import BLOCKS, Nvidia
from refusals import refusal

from phalanx.security.tee.amd.snp_report import decode_tcb, known_products, parse_report, product_of
from phalanx.security.tee.azure.hcl import attestation_key, check_runtime, parse_hcl_report
from phalanx.security.tee.intel.dcap_quote import SGX, TDX, parse_quote, parse_sgx_body
from phalanx.security.tee.nvidia.spdm import parse_measurements, without_padding


def altered(data: bytes, position: int, value: bytes) -> bytes:
    """The same bytes with others at one place."""
    return data[:position] + value + data[position + len(value) :]


# AMD


@pytest.fixture(scope="module")
def snp():
    return Report(report_data=b"\x01" * 64, vmpl=2, signing_key=1).signed_by(p384())


def test_a_report_of_amd_has_its_fields_where_the_specification_has_them(snp):
    report = parse_report(snp)

    assert (report.version, report.vmpl, report.signing_key, report.mask_chip_key) == (3, 2, 1, False)
    assert (report.report_data, report.fields["launch"]) == (b"\x01" * 64, bytes(range(48)).hex())
    assert (report.chip_id, report.family_model) == (b"\x5a" * 64, (0x19, 0x01))
    assert report.tcbs["current"] == report.tcbs["reported"] == report.tcbs["committed"] == raw_tcb("Milan", TCB)
    assert report.tcbs["launch"] == bytes(8)
    assert report.signed == snp[:0x2A0]
    assert report.r.to_bytes(72, "little") + report.s.to_bytes(72, "little") == snp[0x2A0 : 0x2A0 + 144]
    assert parse_report(altered(snp, 0x48, b"\x06")).mask_chip_key


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, b"\x01"), (0, b"\x04"), (0x34, b"\x02"), (0x2A0 + 48, b"\x01"), (0x2A0 + 143, b"\x80"), (1183, b"\x01")],
    ids=["version 1", "version 4", "algorithm", "after r", "after s", "last byte"],
)
def test_a_report_of_amd_with_another_version_algorithm_or_padding_is_refused(snp, position, value):
    assert refusal(lambda: parse_report(altered(snp, position, value))) == "malformed"


def test_a_report_of_amd_has_one_size(snp):
    for data in (b"", snp[:-1], snp + b"\0"):
        assert refusal(lambda data=data: parse_report(data)) == "malformed"


def test_version_2_names_no_product(snp):
    assert parse_report(altered(snp, 0, b"\x02")).family_model is None


@pytest.mark.parametrize(
    ("family", "model", "product"),
    [(0x19, 0, "Milan"), (0x19, 0x0F, "Milan"), (0x19, 0x10, "Genoa"), (0x19, 0x1F, "Genoa"), (0x19, 0x20, None),
     (0x19, 0x9F, None), (0x19, 0xA0, "Genoa"), (0x19, 0xAF, "Genoa"), (0x19, 0xB0, None), (0x1A, 0, "Turin"),
     (0x1A, 0x1F, "Turin"), (0x1A, 0x20, None), (0x18, 1, None)],
)  # fmt: skip
def test_a_processor_belongs_to_one_product_or_none(family, model, product):
    assert product_of((family, model)) == product


@pytest.mark.parametrize("product", known_products())
def test_the_versions_of_a_product_are_decoded_as_they_were_written(product):
    names = set(TCB) if product == "Turin" else set(TCB) - {"fmc"}

    assert decode_tcb(raw_tcb(product, TCB), product) == {name: TCB[name] for name in names}


# Azure


def hcl(runtime: bytes, *, size: int = 0, version: int = 1, request: int = 2, claims=(1, 2, 1)) -> bytes:
    data_size = 20 + len(runtime)
    head = b"HCLA" + struct.pack("<III", version, size or 32 + 1184 + data_size, request) + bytes(16)
    return head + b"\x77" * 1184 + struct.pack("<5I", data_size, *claims, len(runtime)) + runtime


def test_a_report_of_azure_is_a_hardware_report_and_its_runtime_data():
    for padding in (b"", bytes(100)):
        report = parse_hcl_report(hcl(b"runtime") + padding)
        assert (report.hardware, report.runtime) == (b"\x77" * 1184, b"runtime")


@pytest.mark.parametrize(
    "data",
    [b"", b"XCLA" + hcl(b"x")[4:], hcl(b"x", version=3), hcl(b"x", request=1), hcl(b"x", claims=(2, 2, 1)),
     hcl(b"x", claims=(1, 4, 1)), hcl(b"x", claims=(1, 2, 2)), hcl(b"x", size=1), hcl(b"x")[:-1], hcl(b"x") + b"\x01",
     altered(hcl(b"x"), 16, b"\x01"), altered(hcl(b"x"), 1232, b"\x02"), hcl(bytes(8193)), hcl(b"x") + bytes(16384)],
    ids=["empty", "magic", "version", "request", "claims version", "TDX", "hash", "size", "cut", "trailing byte",
         "reserved byte", "runtime size", "runtime too large", "report too large"],
)  # fmt: skip
def test_a_report_of_azure_of_another_form_is_refused(data):
    assert refusal(lambda: parse_hcl_report(data)) == "malformed"


def test_the_hardware_vouches_for_the_hash_of_the_runtime_data_and_zeros():
    digest = hashlib.sha256(b"runtime").digest()

    check_runtime(b"runtime", digest + bytes(32))
    for report_data in (digest + b"\x01" + bytes(31), bytes(64), hashlib.sha256(b"other").digest() + bytes(32)):
        assert refusal(lambda data=report_data: check_runtime(b"runtime", data)) == "wrong_signer"


def runtime_data(**changes) -> dict:
    number = rsa_key("ak").public_key().public_numbers().n.to_bytes(256, "big")
    return {
        "kid": "HCLAkPub",
        "key_ops": ["sign"],
        "kty": "RSA",
        "e": "AQAB",
        "n": base64.urlsafe_b64encode(number).decode().rstrip("="),
        **changes,
    }


def test_the_key_of_the_vtpm_is_the_only_one_of_its_name():
    other = runtime_data(kid="HCLEkPub")

    key = attestation_key(json.dumps({"keys": [other, runtime_data()]}).encode())

    assert key.public_numbers() == rsa_key("ak").public_key().public_numbers()


@pytest.mark.parametrize(
    "keys",
    [[], [runtime_data(), runtime_data()], [runtime_data(kty="EC")], [runtime_data(key_ops=["encrypt"])],
     [runtime_data(n="AQAB")], [runtime_data(n=7)], [runtime_data(e="!")], [{}], None, [runtime_data(e="AA")]],
    ids=["none", "two", "curve", "encrypts", "small", "number", "exponent", "nameless", "no list", "exponent 0"],
)  # fmt: skip
def test_runtime_data_without_one_rsa_key_that_signs_is_refused(keys):
    assert refusal(lambda: attestation_key(json.dumps({"keys": keys}).encode())) == "malformed"


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"keys": [], "keys": []}', b"[" * 20000])
def test_runtime_data_that_is_no_object_of_unique_names_is_refused(data):
    assert refusal(lambda: attestation_key(data)) == "malformed"


# Intel


@pytest.fixture(scope="module")
def intel():
    return Intel()


@pytest.mark.parametrize(
    ("version", "tee", "body"),
    [(3, SGX, sgx_body(b"\x09")), (4, SGX, sgx_body(b"\x09")), (4, TDX, tdx_body(b"\x09")), (5, SGX, sgx_body(b"\x09")),
     (5, TDX, tdx_body(b"\x09")), (5, TDX, tdx_body(b"\x09", version_15=True))],
    ids=["v3 SGX", "v4 SGX", "v4 TDX", "v5 SGX", "v5 TDX 1.0", "v5 TDX 1.5"],
)  # fmt: skip
def test_quotes_of_every_version_are_read(intel, version, tee, body):
    data = intel.quote(version, tee, body)

    quote = parse_quote(data)

    assert (quote.version, quote.tee, quote.body.report_data) == (version, tee, b"\x09".ljust(64, b"\0"))
    assert data.startswith(quote.signed)
    assert len(quote.signed) == 48 + len(body) + (6 if version == 5 else 0)
    assert (len(quote.signature), len(quote.attestation_key), len(quote.qe_signature)) == (64, 64, 64)
    assert (quote.qe.product_id, quote.qe.svn, quote.qe_auth) == (2, 4, bytes(range(32)))
    assert quote.chain.startswith(intel.pck.pem)
    if tee == TDX:
        assert quote.body.fields["mrtd"] == "33" * 48
        assert quote.body.fields["rtmr3"] == "43" * 48
        assert ("tee_tcb_svn2" in quote.body.fields) == (len(body) == 648)
    else:
        assert (quote.body.fields["mrenclave"], quote.body.fields["mrsigner"]) == ("11" * 32, "77" * 32)


@pytest.mark.parametrize(
    ("version", "tee", "position", "value"),
    [(3, SGX, 0, b"\x02"), (3, SGX, 0, b"\x06"), (3, SGX, 2, b"\x03"), (3, SGX, 4, b"\x81"), (4, TDX, 4, b"\x01"),
     (4, TDX, 12, b"\0"), (5, TDX, 48, b"\x01"), (5, TDX, 48, b"\x03"), (5, TDX, 50, b"\x49"), (4, TDX, 764, b"\x05"),
     (4, TDX, 632, b"\xff"), (4, TDX, 635, b"\x01")],
    ids=["version 2", "version 6", "key type", "TDX in version 3", "TEE type", "vendor", "SGX body", "TDX 1.5 body",
         "body size", "certification type", "signature size", "signature size above the limit"],
)  # fmt: skip
def test_quotes_with_another_header_body_or_size_are_refused(intel, version, tee, position, value):
    data = intel.quote(version, tee, sgx_body(b"") if tee == SGX else tdx_body(b""))
    assert parse_quote(data).version == version

    assert refusal(lambda: parse_quote(altered(data, position, value))) == "malformed"


@pytest.mark.parametrize(("version", "is_accepted"), [(3, False), (4, True), (5, True)])
def test_zeros_follow_a_quote_from_version_4_on_and_nothing_else(intel, version, is_accepted):
    data = intel.quote(version, SGX, sgx_body(b""))
    if is_accepted:
        assert parse_quote(data + bytes(50)) == parse_quote(data)
    else:
        assert refusal(lambda: parse_quote(data + b"\0")) == "malformed"
    assert refusal(lambda: parse_quote(data + b"\x01")) == "malformed"
    assert refusal(lambda: parse_quote(data[:-1])) == "malformed"
    assert refusal(lambda: parse_quote(data + bytes(65536))) == "malformed"


def test_an_enclave_report_has_one_size():
    for size in (383, 385):
        assert refusal(lambda size=size: parse_sgx_body(bytes(size))) == "malformed"


# NVIDIA


@pytest.fixture(scope="module")
def spdm():
    return Nvidia().report(b"\x0c" * 32)


def test_a_report_of_nvidia_is_read(spdm):
    report = parse_measurements(spdm)

    assert (report.nonce, report.measurements) == (b"\x0c" * 32, BLOCKS)
    assert (report.driver_version, report.vbios_version, report.is_decoder_off) == (
        "575.01.02",
        "96.00.9F.00.01",
        False,
    )
    assert report.firmware_id == b"\x5f" * 48
    assert report.signed + report.signature == spdm


def test_zeros_after_a_report_of_nvidia_are_cut_and_anything_else_is_left_for_the_appraiser(spdm):
    assert without_padding(spdm + bytes(9)) == spdm
    for data in (spdm + b"\x01", spdm[:-1], b""):
        assert without_padding(data) == data
        assert refusal(lambda data=data: parse_measurements(data)) == "malformed"


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, b"\x12"), (1, b"\xe1"), (2, b"\0"), (3, b"\x01"), (37, b"\x12"), (38, b"\x61"), (41, b"\x04"), (41, b"\x06"),
     (41, b"\0"), (45, b"\0"), (45, b"\xff"), (45, b"\x02"), (46, b"\0"), (47, b"\x34")],
    ids=["request version", "request", "unsigned", "not all", "response version", "response", "one block fewer",
         "one block more", "no block", "block 0", "block 255", "block twice", "another form", "block size"],
)  # fmt: skip
def test_a_report_of_nvidia_of_another_form_is_refused(spdm, position, value):
    assert refusal(lambda: parse_measurements(altered(spdm, position, value))) == "malformed"


def test_a_report_without_a_measurement_is_refused():
    assert refusal(lambda: parse_measurements(Nvidia().report(bytes(32), blocks={}))) == "malformed"


def opaque_report(fields: bytes) -> bytes:
    """A report with these opaque fields and no sound signature."""
    record = struct.pack("<BBHBH", 1, 1, 4, 0, 1) + b"m"
    head = b"\x11\xe0\x01\xff" + bytes(33) + b"\x11\x60\0\0\x01" + len(record).to_bytes(3, "little") + record
    return head + bytes(32) + struct.pack("<H", len(fields)) + fields + bytes(96)


def test_fields_that_appraisal_reads_stand_once_and_may_lack():
    driver, unknown = struct.pack("<HH", 3, 1) + b"5", struct.pack("<HH", 99, 0)
    decoder = struct.pack("<HH", 11, 2) + b"\x55\0"

    report = parse_measurements(opaque_report(driver + unknown + unknown + decoder))
    assert (report.driver_version, report.vbios_version, report.firmware_id) == ("5", "", b"")
    assert report.is_decoder_off
    assert refusal(lambda: parse_measurements(opaque_report(driver + driver))) == "malformed"
    assert refusal(lambda: parse_measurements(opaque_report(driver + b"\x03"))) == "malformed"


def test_a_report_of_amd_is_the_one_that_appraisal_reads(binding):
    amd = Amd()

    assert parse_report(amd.case(binding).evidence.data).report_data == binding.binding_digest().ljust(64, b"\0")
