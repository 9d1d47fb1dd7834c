"""An insider that tries everything: each single act in its turn, then pairs of acts that lead to something new."""

import pytest
from account import Account, Part, SettingRecord, digest_sources, read_schedule, short_text
from acts import Act, Alter, At, Crash, Lie, Schedule, Send, Withhold
from companies import COMPANIES
from generating import MANY, singles, spread
from lean import SharedParts
from liar import Point
from neighbours import KINDS, neighbours_of, places
from playing import Theatre
from protocol_page import CONTENT, IDENTITY
from searching import SETTINGS, Search, describe

QUICK = SETTINGS[:3]
EXACT = next(setting for setting in SETTINGS if setting.company == "K3 exact")
QUICK_SINGLES, QUICK_PAIRS = 16, 6
FEWER_SINGLES, FEWER_PAIRS = 8, 2


def test_accounts_of_two_processes_that_went_on_from_one_are_joined():
    def account(cpu_s, schedules):
        settings = {name: SettingRecord({"singles": 0}, cpu_s=seconds) for name, seconds in cpu_s.items()}
        return Account("a protocol", [Part("first", 5), *(Part("later", number) for number in schedules)], settings)

    one, other = account({"K3": 9.0, "K4": 2.0}, [7]), account({"K3": 2.0, "K4": 8.0}, [11])
    other.findings = {"sign": {"fault": "a fault"}}
    one.join(other)

    assert [part.schedules for part in one.parts] == [5, 7, 11]
    assert {name: each.cpu_s for name, each in one.settings.items()} == {"K3": 9.0, "K4": 8.0}
    assert list(one.findings) == ["sign"]
    with pytest.raises(ValueError, match="an account of the protocol another"):
        one.join(Account("another"))


@pytest.mark.parametrize(
    ("setting", "num_singles", "num_pairs"),
    [
        pytest.param(QUICK[0], FEWER_SINGLES, FEWER_PAIRS, id=f"{QUICK[0].company}, fewer"),
        *(
            pytest.param(setting, QUICK_SINGLES, QUICK_PAIRS, marks=pytest.mark.slow, id=setting.company)
            for setting in (*QUICK, EXACT)
        ),
    ],
)
def test_a_cut_through_all_acts_harms_nobody_honest(theatre, setting, num_singles, num_pairs):
    search = Search(theatre, setting)

    search.play_list("singles", num_singles)
    for name in ("crashes", "words", "pairs"):
        search.play_list(name, num_pairs)

    assert [describe(finding) for finding in search.findings.values()] == []


def test_a_search_goes_on_where_its_account_ends(theatre, tmp_path):
    path = tmp_path / "adversary.json"
    whole, parts = _NotedTheatre(theatre), _NotedTheatre(theatre)
    _play(whole, Account("a protocol"), 4, path)

    _play(parts, Account("a protocol"), 2, path)
    _play(parts, Account.open(path, "a protocol"), 2, path)

    assert whole.schedules == parts.schedules
    assert Account.open(path, "a protocol").sums()["schedules"] == 8
    assert Account.open(path, "another protocol").sums()["schedules"] == 0
    assert Account.open(path, "another protocol").earlier[0]["schedules"] == 8


class _NotedTheatre:
    """Notes which schedules with acts are played."""

    def __init__(self, theatre):
        self._theatre, self.schedules = theatre, set()

    def play(self, schedule):
        if schedule.num_acts:
            self.schedules.add(short_text(schedule))
        return self._theatre.play_once(schedule)

    def faults(self, schedule, outcome):
        return self._theatre.faults(schedule, outcome)


def _play(theatre, account, number, path):
    record = account.settings.setdefault("K3 / 1", SettingRecord())
    search = Search(theatre, SETTINGS[0], record=record)
    for name in ("singles", "crashes"):
        search.play_list(name, number)
    account.parts.append(Part("a commit", search.num_played, search.num_pairs, search.num_traces))
    account.write(path)


@pytest.mark.parametrize(
    ("name", "changed", "is_another"),
    [
        ("rule.py", '"""Says more."""\n\ndef rule(n):\n    """Judge."""\n    # why\n    return n > 1\n', False),
        ("rule.py", "def rule(n):\n    return n > 2\n", True),
        ("renamed.py", "def rule(n):\n    return n > 1\n", True),
        ("page.md", "Other words.\n\n| kind | from |\n", False),
        ("page.md", "Words.\n\n| kind | to |\n", True),
    ],
)
def test_an_account_belongs_to_what_the_guard_and_the_generator_do(tmp_path, name, changed, is_another):
    (tmp_path / "rule.py").write_text("def rule(n):\n    return n > 1\n")
    (tmp_path / "page.md").write_text("Words.\n\n| kind | from |\n")
    before = digest_sources(tmp_path, (".", "page.md"))
    if name == "renamed.py":
        (tmp_path / "rule.py").unlink()

    (tmp_path / name).write_text(changed)

    assert (digest_sources(tmp_path, (".", "page.md")) != before) is is_another


def test_a_schedule_is_read_as_it_was_written():
    acts = singles([Point(At("tensor", 0, peer="owner"), (1, None, None, None))], ("worker-1", "worker-2"))
    for act in acts:
        schedule = Schedule("K3", {1: (act,), 2: (Act(At("commit", 1), Crash()),)}, moves=((1, "leave", 2),))
        assert read_schedule(short_text(schedule)) == schedule


@pytest.mark.parametrize("text", ["print()", "Schedule(company=open('x'))", "Act.at", "Schedule('K3')", "(1, 2)"])
def test_what_is_no_schedule_is_not_read(text):
    with pytest.raises((ValueError, TypeError)):
        read_schedule(text)


@pytest.mark.parametrize("company", COMPANIES)
def test_honest_parties_of_each_company_meet_every_bound(theatre, company):
    schedule = Schedule(company, {1: (), 2: ()}, steps=COMPANIES[company].steps)

    outcome = theatre.play(schedule)

    assert theatre.faults(schedule, outcome) == []
    assert (outcome.evicted, outcome.lost, outcome.passed_s) == ([], [], 0.0)


def test_the_same_schedule_goes_the_same_way_twice(theatre):
    schedule = Schedule("K4 spare", {1: (Act(At("tensor", 0), Lie("forward")),), 2: (Act(At("commit", 1), Crash()),)})

    first, second = theatre.play(schedule), theatre.play(schedule)

    # evidence has other bytes: a run has a name of its own
    assert (first.trace, first.weights) == (second.trace, second.weights)


def test_every_field_of_the_written_model_has_a_neighbour():
    for kind in KINDS:
        tried = {place.path[0] for place in places(kind) if neighbours_of(place)}
        # what is free text, a plan or a device is no part of what is judged
        assert {*IDENTITY[kind], *CONTENT[kind]} - tried <= {"plan", "log_head", "doubt"}


def test_single_acts_are_sent_instead_before_behind_late_twice_to_others_and_not_at_all():
    acts = list(singles([Point(At("commit", 0), (1, None, None, None))], ("worker-1", "worker-2")))

    assert {act.deed.when for act in acts if isinstance(act.deed, Send)} == {"instead", "before", "behind", "late"}
    altered = Act(At("commit", 0), Send((Alter(("epoch",), "ahead"),), when="behind"))
    assert altered in acts
    assert len(acts) == len(set(acts)) == len(spread(acts))
    assert MANY > 100


def test_of_acts_with_one_effect_at_one_point_one_is_told_and_none_without_any(theatre):
    at = At("commit", 0)
    same, gone, late = Act(at, Send()), Act(at, Withhold()), Act(at, Send(when="late"))
    older = [Act(at, Send((Alter(("epoch",), value),))) for value in ("ahead", "stale")]

    effects = theatre.forecast("K3", 1, [same, gone, late, *older])

    assert effects.keys() == {gone, late, *older}
    # epoch -1 is read by nobody
    assert len({*effects.values()}) == 4


def test_what_companies_share_changes_no_bit(theatre, tmp_path):
    schedule, parts = Schedule("K3", {1: (Act(At("tensor", 1), Lie("forward")),)}), SharedParts()
    with parts.put_in_place():
        lean = Theatre(tmp_path, parts)
        outcomes = [lean.play(schedule) for _ in range(2)]

    alone = theatre.play(schedule)

    assert {(each.trace, each.weights) for each in outcomes} == {(alone.trace, alone.weights)}
