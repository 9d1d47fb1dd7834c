"""Tiers of hardware with devices that a test plays: genuine structures, the attesters' own code, no such machine."""

import base64
import contextlib
import hashlib
import itertools
import json
import struct
import sys
from pathlib import Path

import pytest
import split_house
from pydantic import ValidationError
from split_house import House
from split_scene import make_scene, split_config, train

from phalanx.errors import CheckpointError, ConfigError, NoEvidenceError, RefusedEvidenceError, TpmError
from phalanx.federated.config import EnclaveSumsConfig
from phalanx.federated.enclave.channel import as_split_config
from phalanx.security.crypto import Identity
from phalanx.security.tee import Binding, Policy, inspect_evidence
from phalanx.security.tee.amd import derived_key
from phalanx.security.tee.amd.derived_key import derive_guest_key
from phalanx.security.tee.aws.nsm import NsmAttester
from phalanx.security.tee.azure import attester as azure
from phalanx.security.tee.azure.vtpm import AzSnpVtpmReference
from phalanx.security.tee.formats.cbor import encode_cbor
from phalanx.security.tee.tsm import TsmAttester
from phalanx.split.config import HARDWARE_TIERS
from phalanx.split.handshake import meeting
from phalanx.split.hardware import tier as tiers
from phalanx.split.hardware.measure import policy_of
from phalanx.testing import SplitSimulator

sys.path.append(str(Path(__file__).parents[1] / "security" / "tee"))
amd, aws, intel, swtpm_lab, readers, authority = (
    pytest.importorskip(name) for name in ("amd", "aws", "intel", "swtpm_lab", "test_tee_readers", "authority")
)
ANY = Binding(b"\1" * 32, b"\2" * 32, b"\3" * 32)


class PlayedMachine:
    """A confidential machine: what its kernel answers is signed for what was asked, by a vendor of the test's own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._folder, self._numbers = kind, folder, itertools.count()
        self._vendor = {"snp": amd.Amd, "tdx": intel.Intel, "nitro": aws.Aws}[kind]()

    def _case(self, binding):
        if self.kind == "tdx":
            return self._vendor.case(binding, 4, intel.tdx_body(binding.binding_digest()))
        return self._vendor.case(binding)

    @property
    def policy(self) -> Policy:
        return self._case(ANY).policy

    def make_evidence(self, binding):
        case, root = self._case(binding), self._folder / f"request-{next(self._numbers)}"
        if self.kind == "nitro":
            answer = encode_cbor({"Attestation": {"document": case.evidence.data}})
            return NsmAttester(ask=lambda path, request: answer).make_evidence(binding)
        driver, aux = ("sev_guest", b"") if self.kind == "snp" else ("tdx_guest", None)
        kernel = readers.Configfs(root, driver, case.evidence.data, aux)
        return TsmAttester(self.kind, root, case.evidence.endorsements, kernel).make_evidence(binding)


def play(monkeypatch, machine, *, key=b"\5" * 32):
    """Let the enclave run on a machine, and its clients accept what that machine is."""

    @contextlib.contextmanager
    def opened(kind, endorsements, *, tpm):
        assert kind == machine.kind
        yield machine

    monkeypatch.setattr(tiers, "open_attester", opened)
    monkeypatch.setattr(tiers, "derive_guest_key", lambda: key)
    monkeypatch.setattr(split_house, "policy_of", lambda split: machine.policy)
    monkeypatch.setattr(meeting, "steady_now", lambda: authority.NOW)


@pytest.mark.parametrize("kind", ["snp", "tdx", "nitro"])
def test_a_session_in_a_confidential_machine_trains_what_any_other_does(source, tmp_path, monkeypatch, kind):
    play(monkeypatch, PlayedMachine(kind, tmp_path))

    with House(source, tmp_path, tier=kind, policy="policy.toml").open() as session:
        losses = [session.train_turn(number) for number in range(2)]
        appraised = {party.latest_appraisal.claims.kind for party in session.lead.enclave_peers}

    assert losses == train(SplitSimulator(make_scene(source)), 2)
    assert appraised == {kind}


def test_a_machine_that_is_another_one_gets_nothing(source, tmp_path, monkeypatch):
    machine, stranger = PlayedMachine("snp", tmp_path), PlayedMachine("snp", tmp_path / "other")
    play(monkeypatch, machine)
    monkeypatch.setattr(split_house, "policy_of", lambda split: stranger.policy)

    with pytest.raises(RefusedEvidenceError):
        House(source, tmp_path, tier="snp", policy="policy.toml").open()


def keep(session):
    step, number, blob = session.lead.request_state()
    kept = bytes(blob)
    session.lead.settle_state(number)
    return step, kept


def test_a_state_of_an_snp_guest_opens_in_the_next_guest_that_was_started_alike_and_in_no_other(
    source, tmp_path, monkeypatch
):
    play(monkeypatch, PlayedMachine("snp", tmp_path))
    house = House(source, tmp_path, tier="snp", policy="policy.toml")
    session = house.open()
    session.train_turn(0)
    step, kept = keep(session)
    session.die()

    # the secure processor gives another measurement another key
    monkeypatch.setattr(tiers, "derive_guest_key", lambda: b"\6" * 32)
    altered = house.open()
    with pytest.raises(CheckpointError, match="another measurement"):
        altered.lead.restore_state(step, memoryview(kept))
    altered.die()
    monkeypatch.setattr(tiers, "derive_guest_key", lambda: b"\5" * 32)
    with house.open() as again:
        again.lead.restore_state(step, memoryview(kept))
        assert again.server._trainer.num_steps == 1


@pytest.mark.parametrize("kind", ["tdx", "nitro"])
def test_where_the_hardware_seals_nothing_no_state_outlives_its_enclave(source, tmp_path, monkeypatch, kind):
    play(monkeypatch, PlayedMachine(kind, tmp_path))
    house = House(source, tmp_path, tier=kind, policy="policy.toml")
    session = house.open()
    session.train_turn(0)
    step, kept = keep(session)
    session.lead.restore_state(step, memoryview(kept))
    session.die()

    with house.open() as again, pytest.raises(CheckpointError, match="does not open"):
        again.lead.restore_state(step, memoryview(kept))

    assert not any(path.name.endswith(".key") for path in (tmp_path / "enclave").iterdir())


def test_the_key_of_a_guest_is_asked_by_what_its_report_says():
    asked = []

    def device(path, request):
        asked.append((str(path), request))
        return bytes(32) + b"\7" * 32

    assert derive_guest_key(ask=device) == b"\7" * 32
    # root of the chip; policy, image, family and measurement; most privileged level
    assert asked == [("/dev/sev-guest", struct.pack("<IIQIIQ", 0, 0, 0b1111, 0, 0, 0))]


@pytest.mark.parametrize("response", [b"", bytes(64), b"\1" + bytes(31) + b"\7" * 32, bytes(32) + b"\7" * 31])
def test_a_processor_that_derives_no_key_is_an_error(response):
    with pytest.raises(NoEvidenceError, match="derives"):
        derive_guest_key(ask=lambda path, request: response)


def test_without_the_device_of_a_guest_that_is_said(tmp_path):
    with pytest.raises(NoEvidenceError, match="sev-guest"):
        derive_guest_key(tmp_path)
    assert derived_key._MESSAGE.size == 32
    # direction, size, letter and number of the request
    assert (3 << 30) | (32 << 16) | (ord("S") << 8) | 1 == derived_key._GET_DERIVED_KEY


@pytest.mark.parametrize("kind", HARDWARE_TIERS)
def test_hardware_is_no_tier_without_a_policy(kind):
    with pytest.raises(ConfigError, match=f'tier = "{kind}" needs the values'):
        policy_of(split_config(tier=kind))
    with pytest.raises(ValidationError, match="set policy"):
        EnclaveSumsConfig(tier=kind)
    assert as_split_config(EnclaveSumsConfig(tier=kind, policy="p.toml", endorsements={"vcek": "v"})).endorsements


def test_endorsements_are_for_hardware_and_missing_ones_are_named(tmp_path):
    with pytest.raises(ValidationError, match="accompany evidence of hardware"):
        split_config(endorsements={"vcek": "vcek.der"})
    split = split_config(tier="tdx", policy="p.toml", endorsements={"collateral": str(tmp_path / "none.json")})
    with pytest.raises(ConfigError, match="none"):
        tiers.open_tier(split, tmp_path / "own", Identity.without_certificate("enclave"))


def test_a_run_file_without_endorsements_keeps_its_digest():
    assert "endorsements" not in split_config().model_dump(mode="json")
    assert "endorsements" not in EnclaveSumsConfig().model_dump(mode="json")


# --- a confidential VM of Azure ------------------------------------------------------------------------


class AzureMachine:
    """A software TPM with what Azure's paravisor puts into it: an attestation key, and a report that vouches for it."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        self.tpm, self.vendor = swtpm_lab.SoftwareTpm(folder), amd.Amd()
        run = self.tpm._run
        run("tpm2_createak", "-C", "ek.ctx", "-c", "az.ctx", "-G", "rsa", "-s", "rsassa", "-u", "az.pem", "-f", "pem")
        run("tpm2_flushcontext", "-t")
        run("tpm2_evictcontrol", "-C", "o", "-c", "az.ctx", hex(azure.ATTESTATION_KEY))
        run("tpm2_flushcontext", "-t")
        number = load_pem_public_key((folder / "az.pem").read_bytes()).public_numbers().n.to_bytes(256, "big")
        modulus = base64.urlsafe_b64encode(number).decode().rstrip("=")
        key = {"kid": "HCLAkPub", "key_ops": ["sign"], "kty": "RSA", "e": "AQAB", "n": modulus}
        runtime = json.dumps({"keys": [key], "user-data": "00"}).encode()
        report = self.vendor.report(ANY, report_data=hashlib.sha256(runtime).digest().ljust(64, b"\0"))
        self.case = self.vendor.case(ANY, report)
        size = 20 + len(runtime)
        head = b"HCLA" + struct.pack("<III", 1, 32 + 1184 + size, 2) + bytes(16)
        hcl = head + self.case.evidence.data + struct.pack("<5I", size, 1, 2, 1, len(runtime)) + runtime
        (folder / "hcl").write_bytes(hcl)
        index = hex(azure.HCL_REPORT_INDEX)
        run("tpm2_nvdefine", index, "-C", "o", "-s", str(len(hcl)), "-a", "ownerread|ownerwrite")
        run("tpm2_nvwrite", index, "-C", "o", "-i", "hcl")
        self.files = {}
        for name in ("vcek", "chain"):
            (folder / name).write_bytes(self.case.evidence.endorsements[name])
            self.files[name] = str(folder / name)

    @property
    def policy(self) -> Policy:
        with tiers.open_tpm(self.tpm.address) as device:
            evidence = azure.AzureAttester(device).make_evidence(ANY)
        known = self.case.policy.references["snp"]
        measured = {**known.measurements, "sha256.7": (inspect_evidence(evidence)["sha256.7"],)}
        reference = AzSnpVtpmReference(measurements=measured, min_tcb=known.min_tcb)
        return Policy({"az-snp-vtpm": reference}, {"az-snp-vtpm": self.case.policy.roots["snp"]})


@pytest.mark.slow
@pytest.mark.skipif(bool(swtpm_lab.missing()), reason=f"not installed: {', '.join(swtpm_lab.missing())}")
def test_an_enclave_in_azure_is_vouched_for_by_the_chip_and_its_states_by_the_vtpm(
    source, tmp_path, tmp_path_factory, monkeypatch, request
):
    machine = AzureMachine(tmp_path_factory.mktemp("tpm"))
    request.addfinalizer(machine.tpm.close)
    policy = machine.policy
    monkeypatch.setattr(split_house, "policy_of", lambda split: policy)
    monkeypatch.setattr(meeting, "steady_now", lambda: authority.NOW)
    given = {"tier": "az-snp-vtpm", "tpm": machine.tpm.address, "policy": "p.toml", "endorsements": machine.files}
    house = House(source, tmp_path, **given)
    session = house.open()
    assert session.lead.enclave_peers[1].latest_appraisal.claims.kind == "az-snp-vtpm"
    session.train_turn(0)
    step, kept = keep(session)
    session.die()
    with tiers.open_tpm(machine.tpm.address) as device:
        assert azure.has_paravisor(device)

    with house.open() as again:
        again.lead.restore_state(step, memoryview(kept))
        assert again.server._trainer.num_steps == 1
    # another system started under the same paravisor: the vTPM gives it no key, and clients accept it not even new
    machine.tpm.extend(7, b"\1" * 32)
    with pytest.raises(TpmError, match="other values"):
        house.open()
    with pytest.raises(RefusedEvidenceError) as refusal:
        House(source, tmp_path / "new", **given).open()
    assert refusal.value.reason == "wrong_measurement"
