"""An owner in league with one site: ciphertexts of BFV can be subtracted, and sealed ones cannot be seen."""

import pytest
import torch
from rounds_scene import Scene
from site_acts import LENGTH, derived_parts
from site_adversary import AdversaryScene, Schedule

from phalanx.federated.carriers import messages as m
from phalanx.federated.rounds import keepers
from phalanx.federated.rounds.keepers import SiteNames, pack_items, unpack_items

pytest.importorskip("tenseal", reason="needs the extra `he`")

ENCRYPT = ("sum", "encrypt")


def without_seals(monkeypatch) -> None:
    monkeypatch.setattr(keepers, "seal_bytes", lambda place, public, data: data)
    monkeypatch.setattr(keepers, "unseal_bytes", lambda place, private, sealed: sealed)


def with_accomplice(home, what: str) -> AdversaryScene:
    """A scene in which the owner hands its accomplice all other sites' parts before it asks for its own."""
    scene = AdversaryScene(home, "homomorphic")
    act = lambda view: derived_parts(view, "site-4", what)  # noqa: E731 - the act of the schedule
    scene.adversary.schedule = Schedule("homomorphic", "site-4", ENCRYPT, what, act)
    return scene


def test_an_accomplice_that_subtracts_all_other_parts_but_one_leaves_that_site_in_the_sum_alone(tmp_path, monkeypatch):
    without_seals(monkeypatch)
    scene = with_accomplice(tmp_path, "subtracted")

    scene.owner.run_round(1, 0.5)

    torch.testing.assert_close(5 * scene.w, scene.update_of("site-0", torch.zeros(LENGTH)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("what", ["subtracted", "copied"])
def test_of_sealed_parts_it_can_make_none_and_is_in_no_sum(tmp_path, what):
    scene = with_accomplice(tmp_path, what)

    record = scene.owner.run_round(1, 0.5)

    others = torch.stack([scene.update_of(f"site-{number}", torch.zeros(LENGTH)) for number in range(4)])
    assert record.left_out == {"site-4": "unfit for site-0, site-1"}
    torch.testing.assert_close(scene.w, others.mean(0), atol=1e-5, rtol=1e-5)


def test_without_seals_a_copy_of_another_sites_part_counts(tmp_path, monkeypatch):
    without_seals(monkeypatch)
    scene = with_accomplice(tmp_path, "copied")

    scene.owner.run_round(1, 0.5)

    updates = [scene.update_of(f"site-{number}", torch.zeros(LENGTH)) for number in (0, 1, 1, 2, 3)]
    torch.testing.assert_close(scene.w, torch.stack(updates).mean(0), atol=1e-5, rtol=1e-5)


def checked(scene: Scene, order, parts) -> tuple[str, ...]:
    """The sites that the first keeper finds fit of what an owner puts before it."""
    reply, payload = scene.carrier.sites["site-0"](order.model_copy(update={"phase": "check"}), pack_items(parts))
    assert isinstance(reply, m.SumReply)
    return SiteNames.names_from_bytes(bytes(payload))


def test_a_part_of_a_sum_that_broke_off_is_none_of_the_next_one(tmp_path):
    scene = AdversaryScene(tmp_path, "homomorphic")
    orders: dict[int, tuple] = {}
    honest = scene.carrier.sites["site-3"]

    def hear(order, payload):
        reply, data = honest(order, payload)
        if getattr(order, "phase", "") == "encrypt":
            orders[order.number] = order, unpack_items(bytes(data), 2)[0]
        return reply, data

    hear.__self__ = honest.__self__
    scene.carrier.sites["site-3"] = hear
    scene.owner.run_round(1, 0.5)
    ((order, part),) = orders.values()

    assert checked(scene, order, [part]) == ("site-3",)
    # neither under another number, nor of another round or other weights
    for changed in ({"number": order.number + 1}, {"round": 2}, {"model": "0" * 64}):
        assert checked(scene, order.model_copy(update=changed), [part]) == ()


def test_a_keeper_opens_no_sum_of_parts_that_it_has_not_checked(tmp_path):
    scene = AdversaryScene(tmp_path, "homomorphic")
    scene.owner.run_round(1, 0.5)
    order = m.SumOrder(ticket=1, round=1, model="0" * 64, number=1, phase="open")

    for names in (("site-0", "site-1", "site-2"), ()):
        reply, _ = scene.carrier.sites["site-0"](order, SiteNames(sites=names).to_bytes())
        assert reply.reason == "refused"


def test_a_phase_of_another_kind_of_sum_is_refused_and_the_site_goes_on(tmp_path):
    scene = AdversaryScene(tmp_path, "masked")
    honest, replies = scene.carrier.sites["site-3"], []

    def hear(order, payload):
        if getattr(order, "phase", "") == "share":
            phases = ("key", "encrypt", "check", "open", "attest", "seal")
            replies.extend(honest(order.model_copy(update={"phase": phase}), payload)[0] for phase in phases)
        return honest(order, payload)

    hear.__self__ = honest.__self__
    scene.carrier.sites["site-3"] = hear
    record = scene.owner.run_round(1, 0.5)

    assert {reply.reason for reply in replies} == {"refused"}
    assert len(replies) == 6
    assert "site-3" in record.shares
