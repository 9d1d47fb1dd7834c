"""An update is admitted once, for its round, if it is what is due; each lie is refused by name."""

import json
import struct

import pytest
import torch
from safetensors.torch import save

from phalanx.errors import UpdateRefusedError
from phalanx.federated.admission import DueUpdates, UpdateAdmission, UpdateHeader, sign_update
from phalanx.federated.rounds.coordinator import SiteRecords, distances_to
from phalanx.security.crypto import Identity, digest_hex

SITES = {name: Identity.without_certificate(name) for name in ("north", "south", "west")}
SHAPES = {"a.weight": (2, 3), "b.bias": (4,)}
DUE = DueUpdates("1" * 64, 3, "2" * 64, SHAPES, torch.float32, max_norm=2.0, max_samples=100)


def admission() -> UpdateAdmission:
    return UpdateAdmission({name: one.public for name, one in SITES.items()})


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def update(given=None, signer="north", values=None, **changes) -> tuple[bytes, bytes]:
    values = save(tensors() if given is None else given) if values is None else values
    header = {
        "run": "1" * 64,
        "site": "north",
        "round": 3,
        "model": "2" * 64,
        "values": digest_hex(values),
        "samples": 5,
    }
    return sign_update(UpdateHeader(**{**header, **changes}), SITES[signer]), values


def test_an_honest_update_is_admitted_with_its_norm():
    given = tensors()

    found = admission().admit_update("north", *update(given), DUE)

    assert (found.site, found.samples) == ("north", 5)
    assert all(torch.equal(found.tensors[name], given[name]) for name in SHAPES)
    assert found.norm == pytest.approx(float(torch.cat([one.flatten() for one in given.values()]).norm()))


def spoiled(name: str, value: float) -> dict[str, torch.Tensor]:
    given = tensors()
    given[name].view(-1)[1] = value
    return given


LIES = {
    "foreign_site": lambda: update(site="east"),
    "not_signed": lambda: update(signer="south"),
    "other_run": lambda: update(run="3" * 64),
    "other_round": lambda: update(round=2),
    "other_model": lambda: update(model="3" * 64),
    "other_shape": lambda: update(tensors() | {"a.weight": torch.ones(3, 2)}),
    "other_dtype": lambda: update({name: one.double() for name, one in tensors().items()}),
    "not_finite": lambda: update(spoiled("b.bias", float("nan"))),
    "empty": lambda: update({name: torch.zeros(shape) for name, shape in SHAPES.items()}),
    "over_norm": lambda: update(spoiled("b.bias", 2.1)),
}


@pytest.mark.parametrize("reason", LIES)
def test_each_lie_is_refused_by_name_and_the_honest_update_may_still_come(reason):
    door = admission()

    with pytest.raises(UpdateRefusedError) as refused:
        door.admit_update("east" if reason == "foreign_site" else "north", *LIES[reason](), DUE)

    assert refused.value.reason == reason
    assert door.admit_update("north", *update(), DUE).site == "north"


def file_of(dtype: str, shape: list[int], size: int = 0) -> bytes:
    """A safetensors file that its library opens, with a tensor that torch does not have."""
    header = json.dumps({"a.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + bytes(size)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, values: (header, values + b"\0"),
        lambda header, values: (header[:-1], values),
        lambda header, values: (header + b" ", values),
        lambda header, values: (b"", values),
        lambda header, values: update(values=b"no tensors"),
        lambda header, values: update(values=b"\xff" * 40),
        lambda header, values: update(values=file_of("F32", [0, 2**63])),
        lambda header, values: update(values=file_of("F32", [0, 2**62, 8])),
        lambda header, values: update(values=file_of("F4", [2], 1)),
        lambda header, values: update(samples=101),
        lambda header, values: update({"other": torch.ones(1)}),
        lambda header, values: update(tensors() | {"more": torch.ones(1)}),
    ],
)
def test_malformed_updates_are_refused(change):
    with pytest.raises(UpdateRefusedError, match=r"malformed|other_shape|other_values|over_samples"):
        admission().admit_update("north", *change(*update()), DUE)


def test_every_byte_of_a_header_counts():
    door, (header, values) = admission(), update()

    for place in range(len(header)):
        with pytest.raises(UpdateRefusedError):
            door.admit_update("north", header[:place] + bytes([header[place] ^ 1]) + header[place + 1 :], values, DUE)


def test_a_second_update_a_copy_and_a_replay_are_refused():
    door = admission()
    door.admit_update("north", *update(), DUE)

    with pytest.raises(UpdateRefusedError, match="second_update"):
        door.admit_update("north", *update(tensors(1)), DUE)
    with pytest.raises(UpdateRefusedError, match="other_bringer: south: delivered an update of north"):
        door.admit_update("south", *update(tensors(3)), DUE)
    later = DueUpdates("1" * 64, 4, "2" * 64, SHAPES, torch.float32, 2.0, 100)
    with pytest.raises(UpdateRefusedError, match="other_round"):
        door.admit_update("north", *update(), later)
    for name in ("north", "south"):
        with pytest.raises(UpdateRefusedError, match="replayed"):
            door.admit_update(name, *update(round=4, site=name, signer=name), later)
    assert door.admit_update("north", *update(tensors(2), round=4), later).site == "north"


def test_a_site_that_is_shut_out_stays_out():
    door = admission()
    door.exclude_site("north", "far in rounds 1 to 3")

    with pytest.raises(UpdateRefusedError, match="excluded: north: far in rounds 1 to 3"):
        door.admit_update("north", *update(), DUE)
    assert door.excluded_sites == {"north": "far in rounds 1 to 3"}


def test_rounds_in_a_row_in_which_a_site_is_far_are_counted_for_people():
    records = SiteRecords()
    near, far = {"north": 1.0, "south": 1.1, "west": 0.9}, {"north": 1.0, "south": 1.1, "west": 5.0}

    counts = []
    for distances in (far, far, near, far):
        records.note_distances(distances)
        counts.append(dict(records.far_rounds))

    assert [one["west"] for one in counts] == [1, 2, 0, 1]
    assert all(one["north"] == one["south"] == 0 for one in counts)


def test_two_refusals_that_show_a_lie_shut_a_site_out():
    records = SiteRecords()

    assert [records.note_refusal("west") for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize("lead", ["the update", "its values"])
def test_what_another_site_hands_in_first_leaves_the_sites_own_update_admitted(lead):
    door, (header, values) = admission(), update()

    if lead == "the update":
        with pytest.raises(UpdateRefusedError, match="other_bringer"):
            door.admit_update("south", header, values, DUE)
    else:
        # who of two sites copied in one round cannot be shown, so that both count
        assert door.admit_update("south", *update(site="south", signer="south"), DUE).site == "south"

    assert door.admit_update("north", header, values, DUE).site == "north"


def test_a_copy_that_came_while_the_sites_own_update_was_on_its_way_makes_no_replay_of_it():
    door = admission()
    later = DueUpdates("1" * 64, 4, "2" * 64, SHAPES, torch.float32, 2.0, 100)

    door.admit_update("south", *update(site="south", signer="south", round=4), later)

    # with "fedbuff" an update of round 3 may come in round 5
    assert door.admit_update("north", *update(), DUE).site == "north"


def test_distances_are_to_the_result():
    found = distances_to(torch.tensor([1.0, 1.0]), {"a": torch.tensor([4.0, 5.0]), "b": torch.tensor([1.0, 1.0])})

    assert found == {"a": 5.0, "b": 0.0}
