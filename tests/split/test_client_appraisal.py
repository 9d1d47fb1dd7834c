"""A client that must bring evidence has a link with its own, for this nonce in this session, or none; each attacker
wins where the one thing that stops it is left out."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from phalanx.errors import RefusedEvidenceError, SealError
from phalanx.security.crypto import Identity
from phalanx.security.tee import Binding, PolicyConfig, SimAttester, build_policy, parse_evidence
from phalanx.split.handshake.client_appraisal import ClientAppraiser
from phalanx.split.handshake.meeting import ClientHandshake, EnclaveHandshake
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.testing.split import MemoryEpochs

ENCLAVE, CLIENT, OTHER = (Identity.without_certificate(name) for name in ("enclave", "north", "south"))
# one release: the enclave measures what clients do, so that its own evidence would pass as theirs but for the binding
CODE, CONFIG = b"\x01" * 32, b"\x02" * 32
KEYS = attested_keys(CLIENT.public)


def policy(code):
    sim = {"measurements": {"code": (code.hex(),)}}
    return build_policy(PolicyConfig.model_validate({"allow_insecure_sim": True, "sim": sim}), None)


def terms_of(session="session", enclave=ENCLAVE):
    return HandshakeTerms(session, CONFIG, enclave.public, attested_keys(enclave.public), 64)


class Pair:
    """A client and an enclave that wants its evidence, up to the client's call."""

    def __init__(self, *, policies=None, clock=lambda: 0.0):
        self.terms = terms_of()
        policies = {CLIENT.name: policy(CODE)} if policies is None else policies
        self.appraiser = ClientAppraiser(self.terms, policies, {CLIENT.name: KEYS}, clock)
        clients = {one.name: one.public for one in (CLIENT, OTHER)}
        attester = SimAttester(ENCLAVE, CODE)
        self.enclave_side = EnclaveHandshake(ENCLAVE, attester, self.terms, MemoryEpochs(), clients, self.appraiser)
        genuine = SimAttester(CLIENT, CODE)
        self.client_side = ClientHandshake(
            CLIENT, self.terms, MemoryEpochs(), lambda: policy(CODE), lambda one: genuine.make_evidence(one).to_bytes()
        )

    def asked(self):
        """The client has appraised the enclave; returns the enclave's nonce."""
        self.client_side.appraise_enclave(
            self.enclave_side.enclave_evidence(CLIENT.name, self.client_side.draw_nonce())
        )
        return self.enclave_side.draw_client_nonce(CLIENT.name)

    def call(self, evidence, sent=None):
        """The client calls with some evidence, in the place of which another may come."""
        token, hello = self.client_side.make_hello(evidence)
        reply, _ = self.enclave_side.admit_client(CLIENT.name, token, hello, evidence if sent is None else sent)
        return self.client_side.accept_reply(reply)


def reason_of(attempt):
    with pytest.raises(RefusedEvidenceError) as refusal:
        attempt()
    return refusal.value.reason


def evidence_for(binding, code=CODE, signs=CLIENT):
    return SimAttester(signs, code).make_evidence(binding).to_bytes()


def no_evidence(pair, nonce):
    return b""


def of_another_key(pair, nonce):
    return evidence_for(pair.terms.client_binding(nonce, attested_keys(OTHER.public)), signs=OTHER)


def of_another_session(pair, nonce):
    return evidence_for(terms_of(session="yesterday").client_binding(nonce, KEYS))


def given_to_another_enclave(pair, nonce):
    return evidence_for(terms_of(enclave=OTHER).client_binding(nonce, KEYS))


def of_another_role(pair, nonce):
    return evidence_for(replace_role(pair.terms.client_binding(nonce, KEYS)))


CHANNEL_KEY = bytearray()
"""The key that the enclave's process signs channels by, as a reflected piece of evidence has it."""


def reflected(pair, nonce):
    """The enclave's own evidence, which it makes for any nonce that it is sent, its own one included."""
    mine = pair.enclave_side.enclave_evidence(CLIENT.name, nonce)
    CHANNEL_KEY[:] = mine[:32]
    # the word on the enclave has to be about this nonce now; the attacker signs what it likes
    pair.client_side.result = replace(pair.client_side.result, binding=pair.terms.enclave_binding(nonce, mine[:32]))
    return mine[32:]


def replayed(pair, nonce):
    """What has passed a moment ago in this very session; the enclave is asked for another nonce since."""
    old = pair.client_side.client_evidence(nonce)
    pair.call(old)
    pair.asked()
    return old


def of_another_program(pair, nonce):
    return evidence_for(pair.terms.client_binding(nonce, KEYS), code=b"\x09" * 32)


def replace_role(binding):
    return Binding(binding.nonce, binding.tls_key, binding.run, "enclave")


def without_keys(terms, nonce, keys):
    return replace(STRONG(terms, nonce, keys), tls_key=b"\0" * 32)


def without_session(terms, nonce, keys):
    return STRONG(replace(terms, run=""), nonce, keys)


def without_enclave(terms, nonce, keys):
    return STRONG(replace(terms, keys=b"\0" * 32), nonce, keys)


def without_role(terms, nonce, keys):
    return replace_role(STRONG(terms, nonce, keys))


def like_the_enclaves(terms, nonce, keys):
    return terms.enclave_binding(nonce, bytes(CHANNEL_KEY))


STRONG = HandshakeTerms.client_binding
BINDS = "phalanx.split.handshake.terms.HandshakeTerms.client_binding"
NONCES = "phalanx.security.tee.roles.secrets.token_bytes"
MEASURES = "phalanx.security.tee.appraisal.check_measurements"


@dataclass(frozen=True)
class Case:
    """An attacker, the reason of its refusal, and what it takes away to win."""

    attack: Callable[[Pair, bytes], bytes]
    reason: str
    target: str = BINDS
    weaker: Callable[..., object] | None = None


CASES = (
    Case(of_another_key, "wrong_key", weaker=without_keys),
    Case(of_another_session, "wrong_run", weaker=without_session),
    Case(given_to_another_enclave, "wrong_run", weaker=without_enclave),
    Case(of_another_role, "wrong_role", weaker=without_role),
    Case(reflected, "wrong_key", weaker=like_the_enclaves),
    Case(replayed, "wrong_nonce", NONCES, lambda count: b"\x05" * count),
    Case(of_another_program, "wrong_measurement", MEASURES, lambda *facts: None),
)


def attack_name(case):
    return case.attack.__name__


def test_a_client_with_its_own_evidence_is_admitted_and_the_enclave_knows_by_which_policy():
    pair = Pair()

    pair.call(pair.client_side.client_evidence(pair.asked()))

    (told,) = pair.appraiser.pop_appraisals()
    assert (told.client, told.reason, told.result.claims.measurements) == ("north", "", {"code": CODE.hex()})
    assert told.result.binding.role == "client"
    assert pair.appraiser.pop_appraisals() == ()
    pair.appraiser.check_appraised("north")


@pytest.mark.parametrize("case", CASES, ids=attack_name)
def test_evidence_that_is_not_this_clients_for_this_nonce_here_is_refused(case):
    pair = Pair()
    evidence = case.attack(pair, pair.asked())
    pair.appraiser.pop_appraisals()

    assert reason_of(lambda: pair.call(evidence)) == case.reason
    assert [(one.client, one.result, one.reason) for one in pair.appraiser.pop_appraisals()] == [
        ("north", None, case.reason)
    ]
    assert reason_of(lambda: pair.appraiser.check_appraised("north")) == "missing_evidence"


@pytest.mark.parametrize("case", CASES, ids=attack_name)
def test_the_same_attacker_wins_where_the_one_thing_that_stops_it_is_left_out(case, monkeypatch):
    monkeypatch.setattr(case.target, case.weaker)
    pair = Pair()

    pair.call(case.attack(pair, pair.asked()))

    pair.appraiser.check_appraised("north")


@pytest.mark.parametrize("case", CASES[:-1], ids=attack_name)
def test_evidence_that_states_nothing_is_refused_by_what_is_signed(case):
    pair = Pair()
    made = parse_evidence(case.attack(pair, pair.asked()))

    assert reason_of(lambda: pair.call(replace(made, statement=None).to_bytes())) == "wrong_binding"


def test_a_client_without_evidence_is_refused_and_taken_where_the_run_has_no_policy_for_it():
    pair, without = Pair(), Pair(policies={})

    pair.asked()
    assert reason_of(lambda: pair.call(b"")) == "missing_evidence"

    assert without.asked() is None
    without.call(b"")
    without.appraiser.check_appraised("north")


def test_evidence_that_was_not_asked_for_is_refused():
    pair = Pair(policies={})
    pair.asked()

    assert reason_of(lambda: pair.call(evidence_for(pair.terms.client_binding(b"\1" * 32, KEYS)))) == "no_reference"


def test_a_nonce_is_good_once_even_for_evidence_that_was_refused():
    pair = Pair()
    nonce = pair.asked()
    assert reason_of(lambda: pair.call(b"")) == "missing_evidence"

    assert (
        reason_of(lambda: pair.appraiser.appraise_client("north", pair.client_side.client_evidence(nonce)))
        == "wrong_nonce"
    )


@pytest.mark.parametrize("garbage", [b"{}", b"\0" * 100, b'{"phalanx_evidence":1}'], ids=str)
def test_what_is_no_evidence_is_refused_as_malformed(garbage):
    pair = Pair()
    pair.asked()

    assert reason_of(lambda: pair.call(garbage)) == "malformed"


def test_a_client_gives_no_evidence_to_an_enclave_that_it_has_not_appraised():
    pair = Pair()

    assert reason_of(lambda: pair.client_side.client_evidence(b"\1" * 32)) == "wrong_nonce"


def test_a_client_that_has_none_to_give_says_so():
    pair = Pair()
    pair.client_side._make_evidence = None

    assert reason_of(lambda: pair.client_side.client_evidence(pair.asked())) == "missing_evidence"


def test_both_sides_rest_on_the_same_evidence_or_have_no_keys():
    pair = Pair()
    binding = pair.terms.client_binding(pair.asked(), KEYS)

    # of another machine of the same kind, as good as the first one
    with pytest.raises(SealError):
        pair.call(evidence_for(binding), sent=evidence_for(binding, signs=OTHER))


def test_new_evidence_is_due_when_it_is_time_and_nothing_is_taken_until_it_has_come():
    now = [0.0]
    pair = Pair(clock=lambda: now[0])
    pair.call(pair.client_side.client_evidence(pair.asked()))

    now[0] = 100.0
    pair.appraiser.require_renewal(now=False, every_s=0.0)
    pair.appraiser.require_renewal(now=False, every_s=100.0)
    pair.appraiser.check_appraised("north")
    now[0] = 102.1
    pair.appraiser.require_renewal(now=False, every_s=100.0)
    assert reason_of(lambda: pair.appraiser.check_appraised("north")) == "missing_evidence"
    pair.appraiser.appraise_client("north", pair.client_side.client_evidence(pair.asked()))
    pair.appraiser.check_appraised("north")
    pair.appraiser.require_renewal(now=True, every_s=0.0)

    assert reason_of(lambda: pair.appraiser.check_appraised("north")) == "missing_evidence"
