"""A skip that the list does not have fails the run; those that it has are listed by name and reason."""

import pytest

from known_skips import Known, read_known, unknown
from slow_shares import ROOT
from test_slow_shares import lab

__all__ = ["lab"]
LIST = '[[skip]]\ntest = "test_gpu.py"\nreason = "needs a GPU"\nbecause = "CI has none"\n'
SKIPS_ITSELF = "import pytest\n@pytest.mark.skip(reason={reason!r})\ndef test_it(): pass\ndef test_other(): pass"


def test_a_skip_is_known_by_its_test_and_its_reason():
    known = [Known("tests/a.py", "needs x", "x is rare")]

    assert unknown([("tests/a.py::test_it", "needs x 3.0")], known) == []
    assert unknown([("tests/a.py::test_it", "needs y")], known) == [("tests/a.py::test_it", "needs y")]
    assert unknown([("tests/b.py::test_it", "needs x")], known) == [("tests/b.py::test_it", "needs x")]


@pytest.mark.parametrize(
    "text",
    [
        '[[skip]]\ntest = ""\nreason = "r"\nbecause = "b"',
        '[[skip]]\ntest = "t"\nreason = " "\nbecause = "b"',
        '[[skip]]\ntest = "t"\nreason = "r"',
        '[[skip]]\ntest = "t"\nreason = "r"\nbecause = "b"\nuntil = "c"',
        '[[skip]]\ntest = "t"\nreason = 3\nbecause = "b"',
    ],
)
def test_an_entry_that_would_allow_too_much_is_refused(text):
    with pytest.raises(ValueError, match="known skips"):
        read_known(text)


def test_the_committed_list_is_of_tests_that_exist():
    known = read_known((ROOT / ".ci" / "known_skips.toml").read_text(encoding="utf-8"))

    gone = [entry.test for entry in known if not list(ROOT.glob(entry.test.partition("::")[0] + "*"))]

    assert known
    assert gone == []


@pytest.mark.parametrize(("reason", "status"), [("needs a GPU", 0), ("needs a rest", 1)])
def test_a_run_fails_by_a_new_skip_alone(lab, reason, status):
    lab.makefile(".toml", known=LIST)
    lab.makepyfile(test_gpu=SKIPS_ITSELF.format(reason=reason))

    done = lab.runpytest_subprocess("--known-skips", "known.toml", "--list-skips", "skips.txt")

    assert done.ret == status
    done.assert_outcomes(passed=1, skipped=1)
    assert f"test_gpu.py::test_it: {reason}" in done.stdout.str()
    assert ("NEW SKIP" in done.stdout.str()) is bool(status)
    assert (lab.path / "skips.txt").read_text() == f"test_gpu.py::test_it: {reason}\n"


def test_a_module_that_skips_itself_is_a_new_skip_too(lab):
    lab.makefile(".toml", known=LIST)
    lab.makepyfile(test_module="import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass")

    done = lab.runpytest_subprocess("--known-skips", "known.toml")

    assert done.ret == 1
    assert "NEW SKIP" in done.stdout.str()


def test_workers_report_their_skips_to_the_process_that_compares(lab):
    lab.makefile(".toml", known=LIST)
    lab.makepyfile(
        test_gpu=SKIPS_ITSELF.format(reason="needs a rest"), test_b="import pytest\npytest.importorskip('no')"
    )

    done = lab.runpytest_subprocess("-n", "1", "--known-skips", "known.toml")

    assert done.ret == 1
    assert done.stdout.str().count("NEW SKIP") == 2


def test_what_the_budget_left_out_is_no_skip(lab):
    lab.makefile(".toml", known=LIST)
    lab.makepyfile(test_gpu="def test_it(): pass")

    done = lab.runpytest_subprocess("--known-skips", "known.toml", "--budget-s", "0")

    assert done.ret == 0
    assert "0 skips" in done.stdout.str()
