"""Evidence read where the kernel, the driver or the hypervisor offers it: fixture trees, and a test in their place.

The hardware path itself is not tested here: no machine of these kinds was at hand.
"""

import shutil
import struct
import sys
import uuid
from types import SimpleNamespace

import pytest
from amd import Amd
from aws import Aws
from intel import Intel, sgx_body, tdx_body
from nvidia import Nvidia

from phalanx.errors import NoEvidenceError
from phalanx.security.tee import ATTESTED_KINDS, BACKENDS, TIERS, appraise_evidence, find_kind, open_attester
from phalanx.security.tee.aws.nsm import NsmAttester
from phalanx.security.tee.formats.cbor import decode_cbor, encode_cbor
from phalanx.security.tee.intel.gramine import GramineAttester
from phalanx.security.tee.nvidia.nvml import NvmlAttester
from phalanx.security.tee.tsm import REPORTS, TsmAttester, provider_kind

VCEK, ASK, ARK = (
    uuid.UUID(one)
    for one in (
        "63da758d-e664-4564-adc5-f4b93be8accd",
        "4ab7b379-bbac-4fe4-a02f-05aef327c782",
        "c0b406a4-a803-4952-9743-3fb6014cd0ae",
    )
)


class Configfs:
    """The kernel's side: fills the directory of a request, and keeps what was asked."""

    def __init__(self, root, provider: str, report: bytes, aux: bytes | None = None, generation: str = "1\n"):
        (root / REPORTS).mkdir(parents=True)
        self.files = {"provider": provider.encode(), "outblob": report, "generation": generation.encode()}
        if aux is not None:
            self.files["auxblob"] = aux
        self.asked = b""

    def make_entry(self, entry):
        entry.mkdir()
        for name, data in self.files.items():
            (entry / name).write_bytes(data)

    def remove_entry(self, entry):
        if (entry / "inblob").exists():
            self.asked = (entry / "inblob").read_bytes()
        shutil.rmtree(entry)


def table(reverse: bool, **certificates: bytes) -> bytes:
    """A certificate table as hosts write it, in either order of a GUID's bytes."""
    known = {"vcek": VCEK, "ask": ASK, "ark": ARK}
    offset, entries, data = 24 * (len(certificates) + 1), b"", b""
    for name, certificate in certificates.items():
        guid = known[name].bytes_le if reverse else known[name].bytes
        entries += guid + struct.pack("<II", offset + len(data), len(certificate))
        data += certificate
    return entries + bytes(24) + data


@pytest.fixture(scope="module")
def amd():
    return Amd()


@pytest.mark.parametrize("reverse", [False, True], ids=["printed order", "reversed groups"])
def test_an_snp_report_with_its_certificates_comes_out_of_configfs_and_passes(amd, binding, tmp_path, reverse):
    case = amd.case(binding)
    aux = table(reverse, vcek=amd.leaf.der, ask=amd.ask.der, ark=amd.ark.der)
    kernel = Configfs(tmp_path, "sev_guest\n", case.evidence.data, aux + bytes(100))

    evidence = TsmAttester("snp", tmp_path, entries=kernel).make_evidence(binding)

    assert appraise_evidence(evidence, case.policy, binding, case.now).claims.kind == "snp"
    assert kernel.asked == binding.binding_digest().ljust(64, b"\0")
    assert list((tmp_path / REPORTS).iterdir()) == []


def test_where_the_host_sends_no_certificates_they_are_added_by_hand(amd, binding, tmp_path):
    case = amd.case(binding)
    kernel = Configfs(tmp_path, "sev_guest\n", case.evidence.data, bytes(24))

    evidence = TsmAttester("snp", tmp_path, case.evidence.endorsements, kernel).make_evidence(binding)

    assert appraise_evidence(evidence, case.policy, binding, case.now)


@pytest.mark.parametrize("cut", [1, 23, 30, 200])
def test_a_table_that_is_cut_is_refused(amd, binding, tmp_path, cut):
    aux = table(False, vcek=amd.leaf.der)[:cut]
    kernel = Configfs(tmp_path, "sev_guest\n", amd.case(binding).evidence.data, aux)

    with pytest.raises(NoEvidenceError, match="certificate table"):
        TsmAttester("snp", tmp_path, entries=kernel).make_evidence(binding)


def test_a_tdx_quote_comes_out_of_configfs_and_passes(binding, tmp_path):
    case = Intel().case(binding, 4, tdx_body(binding.binding_digest()))
    kernel = Configfs(tmp_path, "tdx-guest\n", case.evidence.data)

    evidence = TsmAttester("tdx", tmp_path, case.evidence.endorsements, kernel).make_evidence(binding)

    assert appraise_evidence(evidence, case.policy, binding, case.now).claims.kind == "tdx"


def test_a_report_about_somebody_elses_data_is_refused(amd, binding, tmp_path):
    kernel = Configfs(tmp_path, "sev_guest\n", amd.case(binding).evidence.data, b"", generation="2\n")

    with pytest.raises(NoEvidenceError, match="somebody else writes"):
        TsmAttester("snp", tmp_path, entries=kernel).make_evidence(binding)
    assert list((tmp_path / REPORTS).iterdir()) == []


def test_a_kernel_with_another_driver_or_none_is_named(binding, tmp_path):
    kernel = Configfs(tmp_path, "arm_cca_guest\n", b"", b"")

    with pytest.raises(NoEvidenceError, match="arm_cca_guest"):
        TsmAttester("snp", tmp_path, entries=kernel).make_evidence(binding)
    assert provider_kind(tmp_path, kernel) is None
    with pytest.raises(NoEvidenceError, match="configfs mounted"):
        TsmAttester("snp", tmp_path / "elsewhere").make_evidence(binding)


def test_the_kernels_kind_is_found(tmp_path):
    assert provider_kind(tmp_path, Configfs(tmp_path, "tdx_guest\n", b"")) == "tdx"


def gramine(root, quote: bytes, form: str = "dcap\n"):
    folder = root / "dev" / "attestation"
    folder.mkdir(parents=True)
    (folder / "attestation_type").write_text(form)
    (folder / "user_report_data").write_bytes(bytes(64))
    (folder / "quote").write_bytes(quote)
    return folder


def test_an_sgx_quote_comes_out_of_gramine_and_passes(binding, tmp_path):
    case = Intel().case(binding, 3, sgx_body(binding.binding_digest()))
    folder = gramine(tmp_path, case.evidence.data)

    evidence = GramineAttester(tmp_path, case.evidence.endorsements).make_evidence(binding)

    assert appraise_evidence(evidence, case.policy, binding, case.now).claims.kind == "sgx"
    assert (folder / "user_report_data").read_bytes() == binding.binding_digest().ljust(64, b"\0")


def test_an_enclave_without_attestation_and_no_enclave_are_named(binding, tmp_path):
    with pytest.raises(NoEvidenceError, match="is this a Gramine enclave"):
        GramineAttester(tmp_path).make_evidence(binding)
    gramine(tmp_path, b"", "none\n")
    with pytest.raises(NoEvidenceError, match="remote_attestation"):
        GramineAttester(tmp_path).make_evidence(binding)


def test_a_nitro_document_comes_out_of_the_module_and_passes(binding):
    aws, asked = Aws(), {}

    def module(path, request):
        asked.update(decode_cbor(request, "request"))
        return encode_cbor({"Attestation": {"document": aws.sign(aws.document(binding))}})

    case = aws.case(binding)

    evidence = NsmAttester(ask=module).make_evidence(binding)

    assert appraise_evidence(evidence, case.policy, binding, case.now).claims.kind == "nitro"
    assert asked == {"Attestation": {"user_data": binding.binding_digest(), "nonce": None, "public_key": None}}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (encode_cbor({"Error": "InvalidOperation"}), "InvalidOperation"),
        (encode_cbor({"Attestation": {}}), "no document"),
        (encode_cbor({"Attestation": {"document": "text"}}), "no bytes"),
        (encode_cbor([1]), "no document"),
        (encode_cbor("InputTooLarge"), "no document"),
        (b"", "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_module_that_refuses_or_babbles_is_an_error_of_ours(binding, answer, says):
    with pytest.raises(NoEvidenceError, match=says):
        NsmAttester(ask=lambda path, request: answer).make_evidence(binding)


def test_without_a_nitro_module_that_is_said(binding, tmp_path):
    with pytest.raises(NoEvidenceError, match="Nitro enclave"):
        NsmAttester(tmp_path).make_evidence(binding)


class NvmlError(Exception):
    pass


def driver(case, calls, fails: str = ""):
    """NVIDIA's bindings, as far as they are used."""

    def act(name, value=None):
        def acted(*arguments):
            calls.append(name)
            if name == fails:
                raise NvmlError("Not Supported")
            return value(*arguments) if value else None

        return acted

    report = case.evidence.data
    chain = case.evidence.endorsements["chain"]
    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=act("init"),
        nvmlShutdown=act("shutdown"),
        nvmlDeviceGetHandleByIndex=act("handle", lambda index: index),
        nvmlDeviceGetConfComputeGpuAttestationReport=act(
            "report",
            lambda gpu, nonce: SimpleNamespace(
                attestationReport=bytearray(report.ljust(8192, b"\0")), attestationReportSize=len(report)
            ),
        ),
        nvmlDeviceGetConfComputeGpuCertificate=act(
            "certificate",
            lambda gpu: SimpleNamespace(
                attestationCertChain=bytearray(chain.ljust(5120, b"\0")), attestationCertChainSize=len(chain)
            ),
        ),
    )


def test_a_gpus_report_comes_out_of_the_driver_and_passes(binding):
    case, calls = Nvidia().case(binding), []

    evidence = NvmlAttester(nvml=driver(case, calls)).make_evidence(binding)
    with_manifests = NvmlAttester(0, {"driver_rim": b"..."}, driver(case, [])).make_evidence(binding)

    assert appraise_evidence(evidence, case.policy, binding, case.now).claims.kind == "nv-gpu"
    assert set(with_manifests.endorsements) == {"chain", "driver_rim"}
    assert calls == ["init", "handle", "report", "certificate", "shutdown"]


def test_a_driver_that_counts_its_buffer_s_zeros_hands_out_the_report_alone(binding):
    case = Nvidia().case(binding)

    evidence = NvmlAttester(nvml=driver(case.with_data(case.evidence.data + bytes(3)), [])).make_evidence(binding)

    assert evidence.data == case.evidence.data


def test_what_is_no_report_is_handed_out_as_it_is_for_its_appraiser_to_refuse(binding):
    case = Nvidia().case(binding)

    evidence = NvmlAttester(nvml=driver(case.with_data(b"junk"), [])).make_evidence(binding)

    assert evidence.data == b"junk"


def test_without_nvidias_bindings_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with pytest.raises(NoEvidenceError, match=r"phalanx-train\[nvidia\]"):
        NvmlAttester()


def test_a_gpu_outside_of_confidential_mode_is_named_and_the_driver_let_go(binding):
    calls = []

    with pytest.raises(NoEvidenceError, match="confidential mode"):
        NvmlAttester(nvml=driver(Nvidia().case(binding), calls, "report")).make_evidence(binding)
    assert calls[-1] == "shutdown"


def test_what_a_machine_offers_is_found_the_strongest_first(tmp_path):
    with pytest.raises(NoEvidenceError, match="no evidence"):
        find_kind(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "tpmrm0").write_bytes(b"")
    assert find_kind(tmp_path) == "tpm"
    gramine(tmp_path, b"")
    assert find_kind(tmp_path) == "sgx"
    (tmp_path / "dev" / "nsm").write_bytes(b"")
    assert find_kind(tmp_path) == "nitro"


def test_every_kind_that_is_attested_is_appraised_and_has_a_label():
    assert set(ATTESTED_KINDS) == set(BACKENDS) - {"sim"}
    assert set(TIERS) == set(BACKENDS) | {"process"}
    assert all("not tested by us" in TIERS[kind] for kind in ("snp", "tdx", "sgx", "nitro", "nv-gpu"))


def test_a_simulation_is_never_asked_for_as_hardware():
    with pytest.raises(NoEvidenceError, match="no evidence of it"), open_attester("sim"):
        pass
