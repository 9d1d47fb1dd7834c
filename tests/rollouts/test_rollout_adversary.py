"""An adversary that tries everything: each act of a writer in a rollout round, and evidence of all true headers."""

import pytest
from forged_evidence import convicts, forgeries_of
from round_acts import MOMENTS, Drill, acts_of, finding

ACTS_OF_QUICK_SHARE = 97
"""Each so manieth act; a prime, so that all fields and moments come by."""
FORGERIES_OF_QUICK_SHARE = 23


@pytest.fixture(scope="module")
def drill(policy, tmp_path_factory):
    return Drill(tmp_path_factory.mktemp("drill"), policy)


def findings(drill, acts):
    return {str(act): words for act in acts if (words := finding(drill, act)) is not None}


def test_the_honest_frame_at_every_moment_convicts_nobody(drill):
    acts = [act for act in acts_of(drill) if act.value in ("own", "silence")]

    assert len(acts) == 3 * len(MOMENTS) + 3
    assert findings(drill, acts) == {}


def test_a_share_of_all_acts_convicts_no_honest_writer_and_has_no_lie_trained_on(drill):
    acts = list(acts_of(drill))[::ACTS_OF_QUICK_SHARE]

    assert len(acts) > 30
    assert findings(drill, acts) == {}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_act_convicts_an_honest_writer_or_has_a_lie_trained_on(moment, drill):
    acts = [act for act in acts_of(drill) if act.moment == moment]

    assert len(acts) > 300
    assert findings(drill, acts) == {}


def test_a_share_of_all_forged_files_convicts_no_honest_writer(drill):
    files = list(forgeries_of(drill))[::FORGERIES_OF_QUICK_SHARE]

    assert len(files) > 50
    assert [one.name for one in files if convicts(drill, one)] == []


@pytest.mark.slow
def test_no_forged_file_convicts_an_honest_writer(drill):
    assert [one.name for one in forgeries_of(drill) if convicts(drill, one)] == []
