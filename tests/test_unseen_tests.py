"""What was never seen green is listed when it fails; any other failure fails the run."""

import re

import pytest

from slow_shares import ROOT
from test_slow_shares import lab
from unseen_tests import is_unseen, read_unseen

__all__ = ["lab"]

RED = "import pytest\n@pytest.mark.parametrize('n', range(2))\ndef test_red(n): assert not n\ndef test_green(): pass"


@pytest.fixture(autouse=True)
def write_red_test(lab):
    lab.makepyfile(test_some=RED)


@pytest.mark.quick_cases("-n1-test_some.py", "-n0-*test_red", "-n0-*why")
@pytest.mark.parametrize("line", ["test_some.py", "test_some.py::test_red", "test_some.py::test_red[1]  # why"])
@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_a_failure_on_the_list_is_named_and_does_not_fail_the_run(lab, line, workers):
    (lab.path / "unseen.txt").write_text(f"# those that nobody has seen\n\n{line}\n")

    done = lab.runpytest_subprocess("--unseen=unseen.txt", workers)

    assert done.ret == 0
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["*1 FAILED that were never seen green*", "test_some.py::test_red?1?"])


@pytest.mark.quick_cases("*test_red?0?")
@pytest.mark.parametrize("line", ["test_other.py", "test_some.py::test_green", "test_some.py::test_red[0]"])
def test_any_other_failure_fails_the_run(lab, line):
    (lab.path / "unseen.txt").write_text(line)

    assert lab.runpytest_subprocess("--unseen=unseen.txt").ret == 1


def test_one_excused_failure_excuses_no_second_one(lab):
    lab.makepyfile(test_other="def test_red(): assert 0")
    (lab.path / "unseen.txt").write_text("test_some.py")

    assert lab.runpytest_subprocess("--unseen=unseen.txt").ret == 1


def test_a_file_that_cannot_be_collected_is_not_excused(lab):
    lab.makepyfile(test_some="import no_such_module_here")
    (lab.path / "unseen.txt").write_text("test_some.py")

    assert lab.runpytest_subprocess("--unseen=unseen.txt").ret not in (0, 5)


def test_a_new_skip_fails_a_run_whose_failures_are_all_excused(lab):
    lab.makepyfile(test_skip="import pytest\ndef test_it(): pytest.skip('why not')")
    (lab.path / "unseen.txt").write_text("test_some.py")
    (lab.path / "known.toml").write_text("")

    assert lab.runpytest_subprocess("--unseen=unseen.txt", "--known-skips=known.toml").ret == 1


@pytest.mark.parametrize("text", ["tests/", "tests", ".", "*", "tests/test_some.pyc", "test_it"])
def test_a_line_that_names_no_file_is_refused(text):
    with pytest.raises(ValueError, match="expected a file or a test"):
        read_unseen(text)


def test_a_line_excuses_no_longer_name():
    assert not is_unseen("tests/test_some.py::test_red_again", ["tests/test_some.py::test_red"])


def test_every_line_of_the_list_names_a_slow_test_of_today():
    lines = read_unseen((ROOT / ".ci" / "slow_unseen.txt").read_text(encoding="utf-8"))

    for line in lines:
        file, _, test = line.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(r"pytest\.mark\.slow|\bslow\b", text), line
        assert not test or f"def {test.partition('[')[0]}(" in text, line
    assert len(lines) == len(set(lines))


def test_the_list_is_what_the_continuous_integration_reads():
    assert "--unseen=.ci/slow_unseen.txt" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
