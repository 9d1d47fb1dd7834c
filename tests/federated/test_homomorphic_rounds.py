"""Homomorphic sums in rounds: the weights of the plain mean, opened by all keepers or not at all, for no one alone."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rounds_scene import IDENTITIES, Scene, parabolas

from phalanx.errors import AggregationError, FailedRoundError
from phalanx.federated.carriers import messages as m
from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.keepers import KeeperSumSite, SiteNames, pack_items, unpack_items
from phalanx.federated.rounds.released import ReleasedSums
from phalanx.security.crypto import HybridSealKey
from phalanx.security.homomorphic import MODULUS, share_out

pytest.importorskip("tenseal", reason="needs the extra `he`")

FIVE = ([1.0, 0.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [5.0, 4.0])
KEYS = {"secure": True, "min_cohort": 3, "max_norm": 10.0}


def scene_of(home, **more) -> Scene:
    keepers = ["site-0", "site-1"]
    return Scene(home, parabolas(*FIVE), **{**KEYS, "sums": "homomorphic", "keepers": keepers, **more})


def mean_of(*numbers: int) -> torch.Tensor:
    return torch.tensor([FIVE[number] for number in numbers]).mean(0)


def listening(scene: Scene) -> Scene:
    """Keep what sites are sent and reply, phase by phase."""
    scene.kept, scene.sent = {}, {}
    for name, answer in list(scene.carrier.sites.items()):

        def hear(order, payload, name=name, answer=answer):
            reply, data = answer(order, payload)
            if isinstance(order, m.SumOrder):
                scene.kept.setdefault(order.phase, {})[name] = bytes(data)
                scene.sent.setdefault(order.phase, {})[name] = (order, bytes(payload))
            return reply, data

        scene.carrier.sites[name] = hear
    return scene


def test_one_word_of_the_run_file_changes_and_the_weights_are_those_of_the_plain_mean(tmp_path):
    plain = Scene(tmp_path / "plain", parabolas(*FIVE), max_norm=10.0)
    masked = Scene(tmp_path / "masked", parabolas(*FIVE), **KEYS)
    kept = scene_of(tmp_path / "kept")

    for number in (1, 2, 3):
        for scene in (plain, masked, kept):
            record = scene.owner.run_round(number, 0.5)

    torch.testing.assert_close(kept.w, plain.w, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(kept.w, masked.w, atol=1e-6, rtol=1e-6)
    assert len(record.sums) == 1 and {one.norm for one in record.shares.values()} == {None}


def test_three_keepers_of_which_one_did_not_train_open_the_same_sum(tmp_path):
    scene = scene_of(tmp_path, keepers=["site-4", "site-2", "site-0"])
    scene.carrier.deadly = {"site-3": "train"}

    scene.owner.run_round(1, 1.0)

    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 4), atol=1e-6, rtol=1e-6)


def test_what_one_keeper_opens_and_the_owner_hands_on_tells_nothing_of_the_sum(tmp_path):
    scene = listening(scene_of(tmp_path))

    scene.owner.run_round(1, 1.0)

    first, second = (np.frombuffer(scene.kept["open"][name], "<u4").astype(np.int64) for name in ("site-0", "site-1"))
    total = (first + second) % MODULUS
    # of a sum of small numbers the one share is as large as any number, and says nothing without the other
    assert np.minimum(total, MODULUS - total).max() / MODULUS < 0.5
    assert not np.array_equal(first, total) and not np.array_equal(second, total)


def test_shares_are_uniform_and_add_up_to_the_values():
    whole = np.arange(-50_000, 50_000)

    for keepers in (2, 3, 5):
        shares = share_out(whole, keepers)
        total = sum(shares) % MODULUS

        assert np.array_equal(np.where(total > MODULUS // 2, total - MODULUS, total), whole)
        for share in shares:
            assert share.min() >= 0 and share.max() < MODULUS
            # of 100,000 uniform numbers the mean is within five deviations of the middle
            assert abs(share.mean() / MODULUS - 0.5) < 5 / np.sqrt(12 * 100_000)


@pytest.mark.parametrize("phase", ["train", "key", "encrypt", "check", "open"])
@pytest.mark.parametrize("name", ["site-0", "site-4"])
def test_a_site_may_leave_in_every_phase_and_a_keeper_may_not(tmp_path, phase, name):
    scene = scene_of(tmp_path)
    scene.carrier.deadly = {name: phase}

    if name == "site-0":
        with pytest.raises(
            FailedRoundError, match=r"site-0: (gave no key|checked nothing|opened nothing); a sum is opened by all"
        ):
            scene.owner.run_round(1, 1.0)
        scene.carrier.deadly = {}
        scene.begin_site("site-0")
    scene.owner.run_round(1, 1.0)

    # a site that is not there to encrypt is in no sum; a keeper that comes again opens the one that it was asked for
    left = name == "site-4" and phase in ("encrypt", "train")
    summed = [number for number in range(5) if not left or f"site-{number}" != name]
    torch.testing.assert_close(scene.w, mean_of(*summed), atol=1e-6, rtol=1e-6)


def spoiled(change):
    def forge(data: bytes) -> bytes:
        items = unpack_items(data, 5)
        return change(items)

    return forge


def other_bytes(items):
    return pack_items([(header, part[:-1] + bytes([part[-1] ^ 1])) for header, part in items])


def other_signature(items):
    return pack_items([(header[:-3] + (b'1"}' if header[-3:] == b'0"}' else b'0"}'), part) for header, part in items])


FORGERIES = {
    "nothing": lambda data: b"",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "one part": spoiled(lambda items: pack_items(items[:1])),
    "parts exchanged": spoiled(lambda items: pack_items(items[::-1])),
    "one part twice": spoiled(lambda items: pack_items([items[0], items[0]])),
    "short ciphertext": spoiled(lambda items: pack_items([(header, part[:5000]) for header, part in items])),
    "other ciphertext": spoiled(other_bytes),
    "no signature": spoiled(lambda items: pack_items([(b"{}", part) for _, part in items])),
    "signature of none": spoiled(other_signature),
    "no header": spoiled(lambda items: pack_items([(b"", part) for _, part in items])),
    "endless": lambda data: b"\xff" * 4 + data[4:],
    "endless header": lambda data: data[:4] + b"\xff" * 12 + data[16:],
}


@pytest.mark.parametrize("how", FORGERIES)
def test_forged_and_short_ciphertexts_are_refused_and_the_sum_is_of_the_others(tmp_path, how):
    scene = scene_of(tmp_path)
    honest = scene.carrier.sites["site-4"]

    def forges(order, payload):
        reply, data = honest(order, payload)
        return reply, FORGERIES[how](bytes(data)) if getattr(order, "phase", "") == "encrypt" else data

    scene.carrier.sites["site-4"] = forges
    record = scene.owner.run_round(1, 1.0)

    assert record.left_out == {"site-4": "refused"}
    torch.testing.assert_close(scene.w, mean_of(0, 1, 2, 3), atol=1e-6, rtol=1e-6)


def test_parts_of_another_round_or_of_another_site_are_no_parts(tmp_path):
    scene = listening(scene_of(tmp_path))
    scene.owner.run_round(1, 0.5)
    old = scene.kept["encrypt"]["site-4"]
    replays = scene.carrier.sites["site-4"]

    def sends(order, payload):
        reply, data = replays(order, payload)
        return reply, (old if getattr(order, "phase", "") == "encrypt" else data)

    scene.carrier.sites["site-4"] = sends
    assert scene.owner.run_round(2, 0.5).left_out == {"site-4": "refused"}

    taken = scene.kept["encrypt"]["site-3"]
    scene.carrier.sites["site-4"] = lambda order, payload: (
        (m.SumReply(ticket=order.ticket), taken)
        if getattr(order, "phase", "") == "encrypt"
        else replays(order, payload)
    )
    assert scene.owner.run_round(3, 0.5).left_out == {"site-4": "refused"}


def opening(scene: Scene, keeper: str, choose) -> bytes:
    """Have the owner ask a keeper to check and open what it likes of the round's parts; return what it gets."""
    order, payload = scene.sent["check"][keeper]
    parts = {name: items for name, items in zip(sorted(scene.trainers), unpack_items(payload, 5), strict=True)}
    reply, fit = scene.carrier.sites[keeper](order, pack_items(choose(parts)))
    if not isinstance(reply, m.SumReply):
        return b""
    reply, data = scene.carrier.sites[keeper](order.model_copy(update={"phase": "open"}), bytes(fit))
    return bytes(data) if isinstance(reply, m.SumReply) else b""


@pytest.mark.parametrize(
    "choose",
    [
        lambda parts: [parts["site-4"]],
        lambda parts: [parts["site-4"]] * 3,
        lambda parts: [parts["site-4"], parts["site-3"]],
        lambda parts: [parts[name] for name in ("site-0", "site-1", "site-2", "site-3")],
        lambda parts: [(parts[f"site-{n}"][0], parts["site-4"][1]) for n in range(5)],
        lambda parts: [],
    ],
    ids=["one", "one three times", "two", "all but one", "one under all names", "none"],
)
def test_an_owner_that_has_keepers_open_anything_but_the_sum_of_a_round_gets_nothing(tmp_path, choose):
    scene = listening(scene_of(tmp_path))
    scene.owner.run_round(1, 1.0)

    assert opening(scene, "site-0", lambda parts: [parts[name] for name in sorted(parts)]) != b""
    assert opening(scene, "site-0", choose) == b"" == opening(scene, "site-1", choose)


def test_with_keepers_that_keep_no_book_the_owner_reads_one_update_by_the_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(ReleasedSums, "note_release", lambda own, model, number, members: None)
    scene = listening(scene_of(tmp_path))
    scene.owner.run_round(1, 1.0)
    sums = []
    for count in (5, 4):
        opened = [
            np.frombuffer(opening(scene, one, lambda parts: [parts[n] for n in sorted(parts)][:count]), "<u4")  # noqa: B023
            for one in ("site-0", "site-1")
        ]
        sums.append(sum(one.astype(np.int64) for one in opened) % MODULUS)

    found = (sums[0] - sums[1]) % MODULUS * 10.0 / (MODULUS // 2 // 5)

    assert np.allclose(found, FIVE[4], atol=1e-5)


def test_a_keepers_book_outlives_its_process_and_a_new_key_opens_no_old_part(tmp_path):
    scene = listening(scene_of(tmp_path))
    scene.owner.run_round(1, 1.0)
    order, payload = scene.sent["check"]["site-0"]
    scene.begin_site("site-0")

    _, fit = scene.carrier.sites["site-0"](order, payload)
    reply, _ = scene.carrier.sites["site-0"](*scene.sent["open"]["site-0"])

    assert SiteNames.names_from_bytes(fit) == () and reply.reason == "refused"
    book = ReleasedSums(tmp_path / "site-0")
    with pytest.raises(AggregationError):
        book.note_release(order.model, 1, ("site-0", "site-1", "site-2"))


def test_a_keeper_that_lies_of_what_it_opened_spoils_no_weights(tmp_path):
    scene = scene_of(tmp_path)
    honest = scene.carrier.sites["site-1"]

    def lies(order, payload):
        reply, data = honest(order, payload)
        if getattr(order, "phase", "") != "open":
            return reply, data
        return reply, ((np.frombuffer(data, "<u4").astype(np.int64) + MODULUS // 3) % MODULUS).astype("<u4").tobytes()

    scene.carrier.sites["site-1"] = lies

    with pytest.raises(FailedRoundError, match="a keeper opened another sum than the others, or lies"):
        scene.owner.run_round(1, 1.0)
    assert torch.equal(scene.w, torch.zeros(2))


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8], ids=["none", "short", "beyond"])
def test_what_is_no_opened_sum_is_refused(tmp_path, data):
    scene = scene_of(tmp_path)
    honest = scene.carrier.sites["site-1"]
    scene.carrier.sites["site-1"] = lambda order, payload: (
        (m.SumReply(ticket=order.ticket), data) if getattr(order, "phase", "") == "open" else honest(order, payload)
    )

    with pytest.raises(FailedRoundError, match="site-1: opened nothing"):
        scene.owner.run_round(1, 1.0)


def test_a_key_that_no_keeper_has_signed_is_refused_by_sites_and_owner(tmp_path):
    scene = listening(scene_of(tmp_path))
    scene.owner.run_round(1, 0.5)
    order, keys = scene.sent["encrypt"]["site-4"]
    first, second = unpack_items(keys, 2)
    site = scene.carrier.sites["site-4"]
    stranger = KeeperSumSite(IDENTITIES["site-4"], scene.terms, 2, tmp_path / "site-4")
    own = stranger._key_advert(stranger_key(), HybridSealKey.generate())

    for forged in ([first, first], [second, first], [first], [(second[0], first[1]), second], unpack_items(own, 1) * 2):
        reply, _ = site(order, pack_items(forged))
        assert reply == m.SiteFault(ticket=order.ticket, reason="refused")


def stranger_key():
    from phalanx.security.homomorphic import new_key

    return new_key()


def test_a_site_that_is_no_keeper_opens_nothing(tmp_path):
    scene = listening(scene_of(tmp_path))
    scene.owner.run_round(1, 0.5)
    order, payload = scene.sent["open"]["site-0"]

    reply, _ = scene.carrier.sites["site-3"](order, payload)

    assert reply == m.SiteFault(ticket=order.ticket, reason="refused")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"secure": False}, "set secure = true"),
        ({"keepers": ["a"]}, "a single keeper could read every site"),
        ({"keepers": []}, "keepers: none"),
        ({"keepers": ["a", "a"]}, "distinct"),
        ({"keepers": ["a", "z"]}, "expected 2 distinct sites"),
        ({"weights": "samples"}, "weights: excludes"),
        ({"bucket": 3, "aggregator": "median", "byzantine": 1}, "bucket: excludes"),
        ({"aggregator": "median", "byzantine": 1}, "aggregator: excludes"),
        ({"privacy": {"epsilon": 1.0, "delta": 1e-3}}, "privacy: excludes"),
        ({"sums": "masked"}, "keepers open homomorphic sums"),
        ({"min_cohort": 2}, "sites to hide one"),
    ],
)
def test_what_homomorphic_sums_do_not_go_with_is_refused_by_name(changed, words):
    written = {
        "sites": ["a", "b", "c", "d", "e"],
        "secure": True,
        "min_cohort": 5,
        "sums": "homomorphic",
        "keepers": ["a", "b"],
    }

    config = FederatedConfig.model_validate_json(json.dumps(written))
    assert (config.sums, config.keepers) == ("homomorphic", ("a", "b"))
    with pytest.raises(ValidationError, match=words):
        FederatedConfig.model_validate_json(json.dumps(written | changed))


def test_an_older_run_file_keeps_its_digest():
    older = FederatedConfig.model_validate_json(json.dumps({"sites": ["a", "b", "c"], "secure": True, "min_cohort": 3}))

    assert not {"sums", "keepers"} & older.model_dump().keys()
