"""Nothing that one site says, once or every time, shuts an honest site out, bends a sum or ends the run."""

import os
import zlib

import pytest
from site_adversary import MODES, Schedule, play, schedules

from phalanx.federated.admission import UpdateAdmission
from phalanx.federated.rounds import keepers
from phalanx.federated.rounds.journal import LostRounds

QUICK = {"plain": 10, "rule": 10, "masked": 5, "homomorphic": 1, "enclave": 5}
"""Schedules of the quick share."""
PARTS = {"plain": 4, "rule": 4, "masked": 8, "homomorphic": 24, "enclave": 4}
"""Into how many tests all schedules of a mode are cut."""


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def chosen(mode: str, home) -> list[Schedule]:
    """All schedules of a mode, in an order of their own that tells nothing of what they do."""
    if mode == "homomorphic":
        pytest.importorskip("tenseal", reason="needs the extra `he`")
    return sorted(schedules(mode, home / "samples"), key=lambda one: zlib.crc32(str(one).encode()))


def broken(found: list[Schedule], home) -> dict[str, str]:
    played = {str(one): play(one, home / str(at)) for at, one in enumerate(found)}
    assert played
    return {name: what for name, what in played.items() if what}


@pytest.mark.parametrize("mode", MODES)
def test_a_share_of_all_single_acts_breaks_nothing(tmp_path, mode):
    assert broken(chosen(mode, tmp_path)[: QUICK[mode]], tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "part"), [(mode, part) for mode, parts in PARTS.items() for part in range(parts)])
def test_no_single_act_breaks_anything(tmp_path, mode, part):
    assert broken(chosen(mode, tmp_path)[part :: PARTS[mode]], tmp_path) == {}


def found_by(mode: str, act: str, home) -> str:
    (schedule,) = [one for one in chosen(mode, home) if str(one).endswith(act)]
    return play(schedule, home / "played")


def test_the_adversary_finds_a_door_that_does_not_ask_who_brought_an_update(tmp_path, monkeypatch):
    admit = UpdateAdmission.admit_update
    monkeypatch.setattr(
        UpdateAdmission,
        "admit_update",
        lambda own, bringer, header, values, due: admit(own, own._read_header(header).site, header, values, due),
    )

    what = found_by("plain", "train/all of another site but the ticket/early/always", tmp_path)

    assert what.startswith("round 2: honest sites are missing: {'site-1'")


def test_the_adversary_finds_parts_that_are_not_sealed(tmp_path, monkeypatch):
    monkeypatch.setattr(keepers, "seal_bytes", lambda place, public, data: data)
    monkeypatch.setattr(keepers, "unseal_bytes", lambda place, private, sealed: sealed)

    what = found_by("homomorphic", "site-4/sum.encrypt/part subtracted/late/once", tmp_path)

    assert what == "round 2: the update of site-0 is in the open"


def test_the_adversary_finds_a_round_that_waits_for_a_site_that_spoiled_it(tmp_path, monkeypatch):
    def waits(own, record, members, reason):
        raise keepers.AggregationError(keepers.SumRefusal.TOO_FEW, reason)

    monkeypatch.setattr(LostRounds, "note_lost_round", waits)

    what = found_by("masked", "aggregate-advert-signature.seed_digest altered in all/late/once", tmp_path)

    assert what.startswith("round 2: AggregationError")
