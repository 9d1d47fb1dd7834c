"""Workers in processes of their own, over mutual TLS: an honest one, and one with quantised weights."""

import pytest

from phalanx.errors import PeerLostError
from phalanx.rollouts import (
    PolicyModel,
    RolloutCheck,
    RolloutWorkerConfig,
    generate_rollouts,
    local_rollout_workers,
    rollout_company,
)
from phalanx.rollouts.evidence import explain_any_evidence
from phalanx.security.crypto import create_authority, issue_certificate, load_identity

LIAR = ("phalanx.lab.attacks.rollouts.worker", "best_of_several")


@pytest.fixture
def pki(tmp_path):
    create_authority(tmp_path / "pki")
    for name in ("owner", "writer-0", "writer-1"):
        issue_certificate(tmp_path / "pki", name)
    return tmp_path / "pki"


def local(tmp_path, pki, others):
    return local_rollout_workers(tmp_path / "workers", pki, RolloutWorkerConfig(identity="", owner=""), others)


@pytest.mark.slow
def test_processes_write_texts_and_the_liar_among_them_is_shut_out(policy, request_of_step, tmp_path, pki):
    names, model = ("writer-0", "writer-1"), PolicyModel.from_policy(policy)
    processes = local(tmp_path, pki, {"writer-1": LIAR})
    owner = load_identity(pki / "owner")

    with rollout_company(
        owner, names, "run-1", tmp_path / "evidence", RolloutCheck(rate=0.5), processes=processes
    ) as company:
        found = company.generate(policy, model, request_of_step)

    alone = generate_rollouts(model, request_of_step)
    (verdict,) = company.verdicts
    assert [one.ids for one in found] == [one.ids for one in alone]
    assert (verdict.party, verdict.offence) == ("writer-1", "draw")
    assert not any(processes.is_running(name) for name in names)
    facts = explain_any_evidence(tmp_path / verdict.evidence, pki / "authority.pem", None)
    assert facts["conclusion"].startswith("holds: writer-1")


@pytest.mark.slow
def test_a_worker_that_ends_before_it_joins_is_told_of(tmp_path, pki):
    processes = local(tmp_path, pki, {"writer-0": (*LIAR[:1], "no_such_attack")})

    with (
        pytest.raises(PeerLostError, match="writer-0: ended before it joined: error: attack: found 'no_such_attack'"),
        rollout_company(
            load_identity(pki / "owner"),
            ("writer-0",),
            "run-1",
            tmp_path / "evidence",
            RolloutCheck(),
            processes=processes,
        ),
    ):
        pytest.fail("no worker came")
