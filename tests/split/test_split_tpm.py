"""The tpm tier with a software TPM: real quotes, a key that opens in one state, counters that outlive the enclave."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
from remote_house import RemoteHouse
from split_house import House
from split_scene import make_scene, train

from phalanx.errors import ConfigError, RefusedEvidenceError, RollbackError, TpmError
from phalanx.security.tee import Binding, PolicyConfig, TpmAttester, inspect_evidence, open_tpm
from phalanx.security.tee.tpm.structures import parse_public
from phalanx.split.channel import turn_messages as ask
from phalanx.split.hardware.measure import policy_of
from phalanx.testing import SplitSimulator
from phalanx.train.parties.client_file import ClientFile

sys.path.append(str(Path(__file__).parents[1] / "security" / "tee"))
swtpm_lab, bare_tpm = pytest.importorskip("swtpm_lab"), pytest.importorskip("bare_tpm")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(swtpm_lab.missing()), reason=f"not installed: {', '.join(swtpm_lab.missing())}"),
]


@pytest.fixture
def tpm(tmp_path_factory):
    # a socket's path has at most 107 characters
    found = swtpm_lab.SoftwareTpm(tmp_path_factory.mktemp("tpm"))
    yield found
    found.close()


@pytest.fixture
def house(tpm, source, tmp_path):
    return House(source, tmp_path, tier="tpm", tpm=tpm.address, policy=str(write_policy(tpm, tmp_path)))


def write_policy(tpm, folder):
    with open_tpm(tpm.address) as device, TpmAttester(device) as attester:
        evidence = attester.make_evidence(Binding(b"\1" * 32, b"\2" * 32, b"\3" * 32))
        name = parse_public(attester.ak_public).name.hex()
        lines = ["[tpm]", f'ak_names = ["{name}"]', "[tpm.measurements]"]
        lines += [f'"{one}" = ["{value}"]' for one, value in inspect_evidence(evidence).items()]
    path = folder / "policy.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_session_on_a_tpm_trains_what_any_other_does_and_goes_on_after_a_crash(house, source):
    expected = train(SplitSimulator(make_scene(source)), 3)
    session = house.open()
    losses = [session.train_turn(number) for number in range(2)]
    step, number, blob = session.lead.request_state()
    kept = bytes(blob)
    session.lead.settle_state(number)
    assert session.lead.enclave_peers[1].latest_appraisal.claims.kind == "tpm"
    session.die()

    with house.open() as again:
        again.lead.restore_state(step, memoryview(kept))
        losses.append(again.train_turn(2))

    assert losses == expected


def test_an_older_state_is_refused_by_the_tpms_own_counters(house):
    with house.open() as session:
        states = []
        for number in range(2):
            session.train_turn(number)
            step, sealed, blob = session.lead.request_state()
            states.append((step, bytes(blob)))
            session.lead.settle_state(sealed)

    with house.open() as again:
        with pytest.raises(RollbackError):
            again.lead.restore_state(states[0][0], memoryview(states[0][1]))
        again.lead.restore_state(states[1][0], memoryview(states[1][1]))


def test_a_machine_in_another_state_gets_neither_the_key_nor_a_client(house, tpm):
    with house.open() as session:
        session.train_turn(0)
    tpm.extend(7, b"\x01" * 32)

    with pytest.raises(TpmError, match="other values"):
        house.open()
    # as a fresh enclave it would be refused as well
    (house.directory / "enclave" / "tpm.sealed").unlink()
    (house.directory / "enclave" / "epoch").unlink()
    with pytest.raises(RefusedEvidenceError) as refusal:
        house.open()
    assert refusal.value.reason == "wrong_measurement"


def test_without_a_policy_nobody_knows_which_tpm_is_meant(house):
    with pytest.raises(ConfigError, match=r"split\.policy"):
        policy_of(house.split.model_copy(update={"policy": None}))


class ClientMachine:
    """The machine of client south: its TPM, its policy as the run file has it, and sessions that want its evidence."""

    def __init__(self, tpm, source, folder):
        self.tpm = tpm
        policy = tomllib.loads(write_policy(tpm, folder).read_text())
        policy = PolicyConfig.model_validate_json(json.dumps(policy))
        self.house = RemoteHouse(source, folder, client_policies={"south": policy})

    def client_file(self, tpm=None):
        given = {"run": "run.toml", "identity": "keys", "train": "a.csv", "test": "b.csv"}
        return ClientFile(**given, attester="tpm", tpm=(tpm or self.tpm).address)

    def proves(self, tpm=None):
        return lambda binding: self.client_file(tpm).sign_evidence(binding, self.house.identities["south"])


@pytest.fixture
def machine(tpm, source, tmp_path):
    return ClientMachine(tpm, source, tmp_path)


def test_a_clients_quote_lets_it_in_and_the_owner_hears_of_it(machine):
    heard = []
    with machine.house.open() as session:
        session.join("north")
        session.join("south", proves=machine.proves())
        lead = session.lead(lambda one: isinstance(one, ask.ClientAppraised) and (heard.append(one) or True))

        assert lead.train_step(0, 0).loss > 0

    assert [(one.client, one.evidence, len(one.measurements)) for one in heard] == [("south", "tpm", 8)]


def test_a_clients_machine_in_another_state_or_another_machine_gets_no_link(machine, tmp_path):
    (tmp_path / "other").mkdir()
    other = bare_tpm.BareTpm(tmp_path / "other")
    try:
        with machine.house.open() as session, pytest.raises(RefusedEvidenceError) as refusal:
            session.client("south", proves=machine.proves(other))
    finally:
        other.close()
    assert refusal.value.reason == "wrong_signer"

    machine.tpm.extend(7, b"\x01" * 32)
    with machine.house.open() as session, pytest.raises(RefusedEvidenceError) as refusal:
        session.client("south", proves=machine.proves())

    assert refusal.value.reason == "wrong_measurement"
