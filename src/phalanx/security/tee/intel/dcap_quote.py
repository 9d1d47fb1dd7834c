"""Intel's ECDSA quotes, byte by byte: versions 3 (SGX), 4 and 5 (SGX, TDX 1.0, TDX 1.5).

Source: Intel SGX ECDSA Quote Library Reference, appendix A; Intel TDX DCAP Quoting Library API, appendix A.
"""

from dataclasses import dataclass

from phalanx.security.tee.formats.reader import ByteReader, malformed_error

SGX, TDX = 0x00, 0x81
_WHERE = "quote"
_ECDSA_P256 = 2
_INTEL_QE = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
_PCK_CHAIN, _QE_REPORT = 5, 6
_BODY_TYPES = {1: (SGX, 384), 2: (TDX, 584), 3: (TDX, 648)}
_MAX_AUTH_BYTES = 1024
MAX_QUOTE_BYTES = 64 * 1024


@dataclass(frozen=True)
class SgxBody:
    """Report of an enclave.

    Attributes:
        cpu_svn: Raw security versions of the platform.
        attributes: Flags and XFRM, 16 bytes.
        fields: Hex by name, for reference values.
        product_id: ISVPRODID: the enclave's product id.
        svn: ISVSVN: the enclave's security version.
        report_data: 64 bytes.
    """

    cpu_svn: bytes
    misc_select: bytes
    attributes: bytes
    fields: dict[str, str]
    product_id: int
    svn: int
    report_data: bytes


@dataclass(frozen=True)
class TdxBody:
    """Report of a trust domain.

    Attributes:
        tcb_svn: Sixteen security versions of the TDX module and platform.
        signer_seam: MRSIGNERSEAM, 48 bytes.
        seam_attributes: SEAMATTRIBUTES, 8 bytes.
        attributes: TDATTRIBUTES, 8 bytes.
        fields: Hex by name, for reference values.
        report_data: 64 bytes.
    """

    tcb_svn: bytes
    signer_seam: bytes
    seam_attributes: bytes
    attributes: bytes
    fields: dict[str, str]
    report_data: bytes


@dataclass(frozen=True)
class Quote:
    """One quote.

    Attributes:
        version: 3, 4 or 5.
        tee: `SGX` or `TDX`.
        attestation_key: Point on P-256, 64 bytes.
        qe_report: Raw report of the quoting enclave.
        qe: Parsed report of the quoting enclave.
        qe_signature: Signature of the PCK key over the raw report.
        qe_auth: Data that the quoting enclave authenticated beside the key.
        chain: PEM certificates; the PCK certificate is `chain[0]`.
    """

    version: int
    tee: int
    body: SgxBody | TdxBody
    signed: bytes
    signature: bytes
    attestation_key: bytes
    qe_report: bytes
    qe: SgxBody
    qe_signature: bytes
    qe_auth: bytes
    chain: bytes


def parse_quote(data: bytes) -> Quote:
    """Read a quote.

    Raises:
        RefusedEvidenceError: Anything but exactly one ECDSA quote with its certificate chain inside; zeros may
            follow from version 4 on.
    """
    if len(data) > MAX_QUOTE_BYTES:
        raise malformed_error(_WHERE, f"{len(data)} bytes, allowed {MAX_QUOTE_BYTES}")
    reader = ByteReader(data, _WHERE)
    version, tee = _read_header(reader)
    tee, size = _body_size(reader, version, tee)
    raw = reader.take_bytes(size)
    body = parse_sgx_body(raw) if tee == SGX else _tdx_body(raw)
    signed = reader.bytes_since(0)
    signatures = ByteReader(reader.read_sized(4, MAX_QUOTE_BYTES), _WHERE)
    if version > 3:
        # trust domains are handed their quote in a buffer of fixed size
        reader.skip_zeros(reader.bytes_left, "what follows the quote")
    reader.check_end()
    signature, key = signatures.take_bytes(64), signatures.take_bytes(64)
    if version > 3:
        # since version 4 the quoting enclave's report is itself certification data
        signatures = ByteReader(_read_certification(signatures, _QE_REPORT), _WHERE)
    qe_report, qe_signature = signatures.take_bytes(384), signatures.take_bytes(64)
    qe_auth = signatures.read_sized(2, _MAX_AUTH_BYTES)
    chain = _read_certification(signatures, _PCK_CHAIN)
    qe = parse_sgx_body(qe_report)
    return Quote(version, tee, body, signed, signature, key, qe_report, qe, qe_signature, qe_auth, chain)


def parse_sgx_body(raw: bytes) -> SgxBody:
    """Read the 384 bytes of an enclave's report."""
    reader = ByteReader(raw, "enclave report")
    cpu_svn, misc_select = reader.take_bytes(16), reader.take_bytes(4)
    reader.take_bytes(12)
    fields = {"isv_ext_prod_id": reader.take_bytes(16)}
    attributes = reader.take_bytes(16)
    fields["mrenclave"] = reader.take_bytes(32)
    reader.take_bytes(32)
    fields["mrsigner"] = reader.take_bytes(32)
    reader.take_bytes(32)
    fields["config_id"] = reader.take_bytes(64)
    product_id, svn = reader.read_unsigned(2), reader.read_unsigned(2)
    fields["config_svn"] = reader.take_bytes(2)
    reader.take_bytes(42)
    fields["isv_family_id"] = reader.take_bytes(16)
    report_data = reader.take_bytes(64)
    reader.check_end()
    named = {name: value.hex() for name, value in fields.items()}
    return SgxBody(cpu_svn, misc_select, attributes, named, product_id, svn, report_data)


def _tdx_body(raw: bytes) -> TdxBody:
    reader = ByteReader(raw, "trust domain report")
    tcb_svn = reader.take_bytes(16)
    fields = {"mrseam": reader.take_bytes(48)}
    signer_seam, seam_attributes, attributes = reader.take_bytes(48), reader.take_bytes(8), reader.take_bytes(8)
    fields["xfam"] = reader.take_bytes(8)
    for name in ("mrtd", "mrconfigid", "mrowner", "mrownerconfig", "rtmr0", "rtmr1", "rtmr2", "rtmr3"):
        fields[name] = reader.take_bytes(48)
    report_data = reader.take_bytes(64)
    if reader.bytes_left:
        # TDX 1.5; the second set of versions is of the module that is loaded after an update without restart
        fields["tee_tcb_svn2"], fields["mrservicetd"] = reader.take_bytes(16), reader.take_bytes(48)
    reader.check_end()
    fields["td_attributes"] = attributes
    named = {name: value.hex() for name, value in fields.items()}
    return TdxBody(tcb_svn, signer_seam, seam_attributes, attributes, named, report_data)


def _read_header(reader: ByteReader) -> tuple[int, int]:
    version, key_type = reader.read_unsigned(2), reader.read_unsigned(2)
    if version not in (3, 4, 5):
        raise malformed_error(_WHERE, f"version {version}, known: 3, 4, 5")
    if key_type != _ECDSA_P256:
        raise malformed_error(_WHERE, f"attestation key of type {key_type}, expected 2 (ECDSA P-256)")
    tee = reader.read_unsigned(4)
    if tee not in (SGX, TDX) or (version == 3 and tee != SGX):
        raise malformed_error(_WHERE, f"TEE type {tee:#x} in version {version}")
    reader.take_bytes(4)
    vendor = reader.take_bytes(16)
    if vendor != _INTEL_QE:
        raise malformed_error(_WHERE, f"quoting enclave of vendor {vendor.hex()}, expected Intel's")
    reader.take_bytes(20)
    return version, tee


def _body_size(reader: ByteReader, version: int, tee: int) -> tuple[int, int]:
    if version < 5:
        return tee, 384 if tee == SGX else 584
    kind, size = reader.read_unsigned(2), reader.read_unsigned(4)
    if _BODY_TYPES.get(kind) != (tee, size):
        raise malformed_error(_WHERE, f"body of type {kind} with {size} bytes for TEE type {tee:#x}")
    return tee, size


def _read_certification(reader: ByteReader, expected: int) -> bytes:
    kind = reader.read_unsigned(2)
    if kind != expected:
        raise malformed_error(_WHERE, f"certification data of type {kind}, expected {expected}")
    data = reader.read_sized(4, MAX_QUOTE_BYTES)
    reader.check_end()
    return data
