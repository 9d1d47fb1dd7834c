"""Keys come about only between a client and an enclave that the client has appraised, for a nonce of its own."""

import pytest
import torch
from split_scene import split_config

from phalanx.errors import ConfigError, PeerRefusedError, RefusedEvidenceError, SealError, SignatureError
from phalanx.security.crypto import Identity
from phalanx.security.seal import Purpose, TensorKind, answer_hello
from phalanx.security.tee import PolicyConfig, SimAttester, build_policy, make_sim_evidence
from phalanx.split.handshake.meeting import ClientHandshake, EnclaveHandshake
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.split.hardware.measure import measure_code, policy_of
from phalanx.testing.split import MemoryEpochs

ENCLAVE, CLIENT, OTHER = (Identity.without_certificate(name) for name in ("enclave", "client-0", "client-1"))
CODE, CONFIG = b"\x01" * 32, b"\x02" * 32


def policy(*, revoked=(), code=CODE, allow=True):
    given = {"allow_insecure_sim": allow, "revoked_measurements": tuple(revoked)}
    config = PolicyConfig.model_validate({**given, "sim": {"measurements": {"code": (code.hex(),)}}})
    return build_policy(config, None)


class Pair:
    """Both sides of a handshake, which mean the same, unless told otherwise."""

    def __init__(self, *, enclave=ENCLAVE, client_side=CLIENT, attester=None, rules=None, config=CONFIG):
        self.rules = rules or policy()
        inside = HandshakeTerms("run", CONFIG, enclave.public, attested_keys(enclave.public), 64)
        outside = HandshakeTerms("run", config, ENCLAVE.public, attested_keys(ENCLAVE.public), 64)
        clients = {one.name: one.public for one in (CLIENT, OTHER)}
        attester = attester or SimAttester(enclave, CODE)
        self.enclave_side = EnclaveHandshake(enclave, attester, inside, MemoryEpochs(), clients)
        self.client_side = ClientHandshake(client_side, outside, MemoryEpochs(), lambda: self.rules)

    def appraise(self):
        return self.client_side.appraise_enclave(
            self.enclave_side.enclave_evidence(CLIENT.name, self.client_side.draw_nonce())
        )


def reason_of(attempt):
    with pytest.raises(RefusedEvidenceError) as refusal:
        attempt()
    return refusal.value.reason


def test_an_honest_pair_agrees_on_keys():
    pair = Pair()

    result = pair.appraise()
    reply, _ = pair.enclave_side.admit_client(CLIENT.name, *pair.client_side.make_hello())
    pair.client_side.accept_reply(reply)

    assert result.claims.measurements == {"code": CODE.hex()}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rules": policy(code=b"\x09" * 32)}, "wrong_measurement"),
        ({"rules": policy(revoked=[CODE.hex()])}, "revoked"),
        ({"rules": policy(allow=False)}, "insecure_kind"),
        ({"config": b"\x03" * 32}, "wrong_run"),
        ({"enclave": OTHER}, "wrong_key"),
    ],
)
def test_an_enclave_that_is_not_what_the_client_means_gets_no_token(given, reason):
    pair = Pair(**given)

    assert reason_of(pair.appraise) == reason
    assert reason_of(pair.client_side.make_hello) == "wrong_nonce"


def test_evidence_of_an_earlier_appraisal_is_refused():
    pair = Pair()
    old = pair.enclave_side.enclave_evidence(CLIENT.name, pair.client_side.draw_nonce())

    pair.client_side.draw_nonce()

    assert reason_of(lambda: pair.client_side.appraise_enclave(old)) == "wrong_nonce"
    assert reason_of(lambda: pair.client_side.appraise_enclave(old)) == "wrong_nonce"


def test_genuine_evidence_relayed_from_another_enclave_is_refused():
    honest, relay = Pair(), Pair(enclave=OTHER)
    nonce = relay.client_side.draw_nonce()

    genuine = honest.enclave_side.enclave_evidence(CLIENT.name, nonce)
    relay.client_side.appraise_enclave(genuine)
    token, hello = relay.client_side.make_hello()

    # the relay has no key of the enclave that was appraised
    relay.enclave_side.enclave_evidence(CLIENT.name, nonce)
    assert reason_of(lambda: relay.enclave_side.admit_client(CLIENT.name, token, hello)) == "wrong_key"
    honest.enclave_side.enclave_evidence(OTHER.name, nonce)
    with pytest.raises(RefusedEvidenceError):
        honest.enclave_side.admit_client(OTHER.name, token, hello)


def test_a_reply_that_the_attested_key_did_not_sign_is_refused():
    pair = Pair()
    pair.appraise()
    token, hello = pair.client_side.make_hello()
    reply, _ = pair.enclave_side.admit_client(CLIENT.name, token, hello)

    with pytest.raises((SignatureError, SealError)):
        pair.client_side.accept_reply(reply.replace(b'"signature":"', b'"signature":"0')[:-1])


def reply_of_the_host(pair):
    """The host has the keys of the enclave's certificate, which lie on its disk, and has the enclave give evidence."""
    pair.appraise()
    token, hello = pair.client_side.make_hello()
    terms = pair.client_side._terms.channel_terms(CLIENT.name, token)
    reply, channel = answer_hello(hello, terms, ENCLAVE, MemoryEpochs(), CLIENT.public)
    link = pair.client_side.accept_reply(reply)
    kind = TensorKind(Purpose.LABEL, "labels.train", "int64", (4,))
    return channel.receiver.open_tensor(link.pack_tensor(kind, 0, 0, torch.arange(4)), kind, 0, 0)


def test_a_host_with_the_keys_of_the_enclaves_certificate_gets_no_channel_for_its_own_are_not_attested():
    with pytest.raises(SignatureError):
        reply_of_the_host(Pair())


def test_where_evidence_binds_no_key_of_the_process_that_host_reads_what_clients_send(monkeypatch):
    monkeypatch.setattr(ClientHandshake, "_appraised_peer", ENCLAVE.public)

    assert bytes(reply_of_the_host(Pair())) == torch.arange(4).numpy().tobytes()


def test_new_evidence_of_another_process_does_not_vouch_for_a_channel_that_is_there():
    pair, beside = Pair(), Pair()
    pair.appraise()
    reply, _ = pair.enclave_side.admit_client(CLIENT.name, *pair.client_side.make_hello())
    pair.client_side.accept_reply(reply)

    pair.appraise()
    evidence = beside.enclave_side.enclave_evidence(CLIENT.name, pair.client_side.draw_nonce())

    assert reason_of(lambda: pair.client_side.appraise_enclave(evidence)) == "wrong_key"


def test_a_token_is_good_for_the_client_and_the_evidence_that_it_is_about():
    pair = Pair()
    pair.appraise()
    token, hello = pair.client_side.make_hello()
    pair.enclave_side.admit_client(CLIENT.name, token, hello)

    # used up
    assert reason_of(lambda: pair.enclave_side.admit_client(CLIENT.name, token, hello)) == "wrong_nonce"
    pair.enclave_side.enclave_evidence(CLIENT.name, b"\x07" * 32)
    assert reason_of(lambda: pair.enclave_side.admit_client(CLIENT.name, token, hello)) == "wrong_nonce"
    pair.enclave_side.enclave_evidence(OTHER.name, b"\x07" * 32)
    assert reason_of(lambda: pair.enclave_side.admit_client(OTHER.name, token, hello)) == "bad_signature"


def test_who_is_no_client_is_given_no_evidence_and_a_nonce_has_its_length():
    enclave_side = Pair().enclave_side

    with pytest.raises(PeerRefusedError, match="not a client"):
        enclave_side.enclave_evidence("stranger", b"\x07" * 32)
    with pytest.raises(PeerRefusedError, match="nonce of 5 bytes"):
        enclave_side.enclave_evidence(CLIENT.name, b"short")


def test_a_measurement_that_is_revoked_later_is_found_without_new_evidence():
    pair = Pair()
    pair.appraise()
    pair.client_side.check_still_accepted()

    pair.rules = policy(revoked=[CODE.hex()])

    assert reason_of(pair.client_side.check_still_accepted) == "revoked"
    assert reason_of(pair.appraise) == "revoked"


def test_evidence_in_debug_mode_is_refused():
    class Debugged(SimAttester):
        def make_evidence(self, binding):
            return make_sim_evidence(ENCLAVE, CODE, binding, debug=True)

    assert reason_of(Pair(attester=Debugged(ENCLAVE, CODE)).appraise) == "debug_enabled"


def test_without_a_policy_file_this_releases_own_code_is_accepted_and_no_other():
    rules = policy_of(split_config())

    assert rules.reference_for("sim").measurements == {"code": (measure_code().hex(),)}
    with pytest.raises(RefusedEvidenceError):
        rules.reference_for("snp")


def test_a_policy_file_is_read_anew_each_time(tmp_path):
    path = tmp_path / "policy.toml"
    text = f'allow_insecure_sim = true\nrevoked_measurements = []\n[sim]\nmeasurements.code = ["{CODE.hex()}"]\n'
    path.write_text(text)
    split = split_config(policy=str(path))
    assert policy_of(split).revoked_measurements == frozenset()

    path.write_text(text.replace("[]", f'["{CODE.hex()}"]', 1))

    assert policy_of(split).revoked_measurements == {CODE.hex()}
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        policy_of(split)
