"""Of one update a site lets masks be taken off in the company of one set of sites: a second sum would tell of one."""

import contextlib
import resource
import shutil

import pytest
import torch
from rounds_scene import Scene, parabolas

from phalanx.errors import AggregationError, FailedRoundError, RollbackError
from phalanx.federated.rounds.journal import RoundJournal
from phalanx.federated.rounds.released import ReleasedSums

FIVE = ([1.0, 0.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [5.0, 4.0])


def scene_of(home, **more) -> Scene:
    return Scene(home, parabolas(*FIVE), **{"secure": True, "min_cohort": 3, "max_norm": 10.0, **more})


def sum_without_the_last_site(scene: Scene) -> torch.Tensor:
    """Have an owner that keeps no book of what was released ask for the same round again, of all sites but one."""
    kept = dict(scene.carrier.sites)
    numbers = scene.journal.next_sum
    scene.begin_owner()
    scene.carrier.sites.update({name: one for name, one in kept.items() if name != "site-4"})
    del scene.carrier.sites["site-4"]
    scene.journal.released_sums = lambda number, model: ()
    scene.journal.next_sum = numbers
    scene.owner.run_round(1, 1.0)
    return scene.w


def test_an_owner_that_has_the_same_round_summed_again_without_one_site_gets_no_second_sum(tmp_path):
    scene = scene_of(tmp_path)
    scene.owner.run_round(1, 1.0)

    with pytest.raises(FailedRoundError):
        sum_without_the_last_site(scene)


def test_with_sites_that_keep_no_such_book_it_reads_the_update_of_that_site(tmp_path, monkeypatch):
    monkeypatch.setattr(ReleasedSums, "note_release", lambda own, model, number, members: None)
    scene = scene_of(tmp_path)
    scene.owner.run_round(1, 1.0)
    first = scene.w

    second = sum_without_the_last_site(scene)

    torch.testing.assert_close(5 * first - 4 * second, torch.tensor(FIVE[4]), atol=1e-4, rtol=1e-4)


def test_a_site_that_begins_anew_remembers_what_it_released(tmp_path):
    scene = scene_of(tmp_path)
    scene.owner.run_round(1, 1.0)
    for name in scene.trainers:
        scene.begin_site(name)

    with pytest.raises(FailedRoundError):
        sum_without_the_last_site(scene)


def test_a_run_file_that_is_run_once_more_has_sums_with_the_same_sites(tmp_path):
    """Of a new run directory the owner's journal is new, and the sites remember the numbers of the sums before."""
    scene = scene_of(tmp_path)
    scene.owner.run_round(1, 0.1)
    first = scene.w
    scene.owner.run_round(2, 0.1)
    shutil.rmtree(tmp_path / "journal")

    scene.begin_owner()
    scene.owner.run_round(1, 0.1)

    torch.testing.assert_close(scene.w, first, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sites", [5, 9])
def test_a_sum_that_broke_off_when_its_masks_came_off_is_made_again_of_the_same_sites(tmp_path, sites):
    keys = {} if sites == 5 else {"bucket": 3, "aggregator": "median", "byzantine": 1}
    scene = Scene(
        tmp_path,
        parabolas(*([float(n), 1.0] for n in range(sites))),
        secure=True,
        min_cohort=3,
        max_norm=20.0,
        **keys,
    )
    scene.carrier.deadly = dict.fromkeys(["site-2", "site-3", "site-4"], "release")
    with pytest.raises(FailedRoundError):
        scene.owner.run_round(1, 1.0)

    scene.carrier.deadly = {}
    for name in scene.trainers:
        if name not in scene.carrier.sites:
            scene.begin_site(name)
    record = scene.owner.run_round(1, 1.0)

    assert len(record.shares) == sites
    assert (scene.w[0] - (sites - 1) / 2).abs() < (1e-5 if sites == 5 else 1.5)


def test_without_one_of_those_sites_it_is_not_made_and_the_owner_says_which_one_is_missing(tmp_path):
    scene = scene_of(tmp_path)
    scene.carrier.deadly = dict.fromkeys(["site-3", "site-4"], "release")
    with pytest.raises(FailedRoundError):
        scene.owner.run_round(1, 1.0)
    scene.carrier.deadly = {}
    scene.begin_site("site-3")

    record = scene.owner.run_round(1, 1.0)

    assert "site-4: in a sum of this round that was not finished" in record.lost
    assert not record.shares and torch.equal(scene.w, torch.zeros(2))
    # the next round is of other updates, so that the run goes on
    assert len(scene.owner.run_round(2, 1.0).shares) == 4
    torch.testing.assert_close(scene.w, torch.tensor(FIVE[:4]).mean(0), atol=1e-5, rtol=1e-5)


def test_a_site_that_was_in_no_sum_when_it_broke_off_is_left_out_of_the_next_try(tmp_path):
    scene = scene_of(tmp_path)
    scene.carrier.deadly = {"site-4": "mask", "site-2": "release", "site-3": "release"}
    with pytest.raises(FailedRoundError):
        scene.owner.run_round(1, 1.0)
    scene.carrier.deadly = {}
    for name in ("site-2", "site-3", "site-4"):
        scene.begin_site(name)

    record = scene.owner.run_round(1, 1.0)

    assert record.left_out == {"site-4": "left the sum"}
    torch.testing.assert_close(scene.w, torch.tensor([2.5, 1.5]), atol=1e-5, rtol=1e-5)


def test_the_journal_remembers_through_a_crash_which_sites_a_sum_was_released_for(tmp_path):
    scene = scene_of(tmp_path)
    scene.owner.run_round(1, 1.0)
    (line,) = [one for one in RoundJournal(tmp_path / "journal")._released.items()]

    assert line[0][0] == 1 and line[1][0].members == tuple(sorted(scene.trainers))


def test_the_book_takes_the_same_sum_again_and_no_other(tmp_path):
    ReleasedSums(tmp_path).note_release("a" * 64, 1, ("x", "y", "z"))
    book = ReleasedSums(tmp_path)

    book.note_release("a" * 64, 1, ("z", "x", "y"))
    book.note_release("b" * 64, 2, ("x", "y"))
    book.note_release("a" * 64, 2, ("x", "y"))
    for number, members in ((1, ("x", "y")), (1, ("w", "x", "y", "z")), (2, ("x", "y", "z"))):
        with pytest.raises(AggregationError, match="their difference would reveal"):
            book.note_release("a" * 64, number, members)


def test_a_line_that_a_crash_has_cut_was_never_written_and_a_damaged_book_is_refused(tmp_path):
    ReleasedSums(tmp_path).note_release("a" * 64, 1, ("x", "y", "z"))
    path = tmp_path / "released-sums.jsonl"
    whole = path.read_bytes()

    path.write_bytes(whole + b'{"members": "x')
    ReleasedSums(tmp_path).note_release("a" * 64, 1, ("x", "y", "z"))
    assert path.read_bytes() == whole
    for damaged in (b"[]\n", b"{}\n", b"no json\n"):
        path.write_bytes(whole + damaged)
        with pytest.raises(RollbackError, match="line 2"):
            ReleasedSums(tmp_path)


def test_on_a_full_disk_a_cut_line_goes_and_no_other(tmp_path):
    log = ReleasedSums(tmp_path)
    log.note_release("a" * 64, 1, ("north", "south", "west"))
    path = tmp_path / "released-sums.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"model":')

    bounds = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, bounds[1]))
    try:
        with contextlib.suppress(OSError):
            ReleasedSums(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bounds)

    assert path.read_bytes() == whole
