"""Eight turns run each test once; a budget leaves tests out by name."""

import json
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slow_shares import ROOT, expected_s, fits, means, parse_share, read_record, share_of

LAB = """
    import sys
    sys.path.insert(0, {tests!r})
    pytest_plugins = ("slow_shares", "known_skips", "unseen_tests")
"""


SPINNING = """
    import subprocess, sys
    import pytest
    SPIN = "import time\\nwhile time.process_time() < 0.5: pass"
    @pytest.mark.parametrize("n", range(4))
    def test_it(n):
        subprocess.run([sys.executable, "-c", SPIN], check=True)
"""


@pytest.fixture
def lab(pytester, monkeypatch):
    # the plugins that other packages bring take two seconds of each run
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist")
    pytester.makeconftest(LAB.format(tests=str(ROOT / "tests")))
    return pytester


names = st.lists(st.integers(0, 9).map(lambda n: f"tests/test_{n}.py"), min_size=1, max_size=40).map(
    lambda files: [f"{file}::test_{n}" for n, file in enumerate(sorted(files))]
)
records = st.dictionaries(
    st.sampled_from([f"tests/test_{f}.py::test_{n}" for f in range(9) for n in range(9)]), st.floats(0, 500)
)


@given(names, records, st.integers(0, 1000), st.integers(1, 9), st.integers(1, 9))
def test_consecutive_turns_run_every_test_once_and_cut_no_group(tests, record, turn, num_shares, size):
    groups = {test: f"group {n // size}" for n, test in enumerate(tests) if n // size % 2}

    shares = [share_of(tests, turn + n, num_shares, record, groups) for n in range(num_shares)]

    assert sorted(test for share in shares for test in share) == sorted(tests)
    for group in set(groups.values()):
        assert sum(any(groups.get(test) == group for test in share) for share in shares) == 1


def test_shares_take_about_equal_recorded_time():
    tests = [f"tests/test_slow.py::test_{n}" for n in range(4)] + [f"tests/test_quick.py::test_{n}" for n in range(40)]
    record = dict.fromkeys(tests[:4], 100.0) | dict.fromkeys(tests[4:], 10.0)

    shares = [share_of(tests, turn, 8, record) for turn in range(8)]

    assert [len(share) for share in shares] == [1, 1, 1, 1, 10, 10, 10, 10]


def test_a_share_begins_a_third_further_on_when_the_turns_have_gone_round():
    tests = [f"tests/test_some.py::test_{n}" for n in range(6)]

    first, second, third, fourth = (share_of(tests, turn, 1, {}) for turn in range(4))

    assert first == fourth == tests
    assert second == tests[2:] + tests[:2]
    assert third == tests[4:] + tests[:4]


@pytest.mark.parametrize("text", ["", "3", "3/", "/8", "3/0", "-1/8", "a/b", "1/2/3", "1.5/8"])
def test_a_malformed_share_is_refused(text):
    with pytest.raises(ValueError, match="expected TURN/N"):
        parse_share(text)


def test_a_test_begins_only_where_it_is_expected_to_end_within_the_budget():
    assert fits(50.0, 50.0, 100.0)
    assert not fits(50.0, 50.1, 100.0)


def test_what_no_record_knows_is_guessed():
    record = {"tests/test_some.py::test_a": 50.0}

    assert expected_s("tests/test_some.py::test_a[one [case]]", record) == 50.0
    assert expected_s("tests/test_some.py::test_b", record) == 30.0


def test_the_mean_of_a_function_counts_each_of_its_cases():
    assert means([("a.py::x[1]", 1.0), ("a.py::x[2]", 3.0), ("b.py::z", 1.0)]) == {"a.py::x": 2.0, "b.py::z": 1.0}


def test_every_recorded_function_is_still_there():
    for function in read_record(ROOT / ".ci" / "slow_seconds.json"):
        file, _, name = function.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), function


DRAWN = """
    import pytest
    from hypothesis import given, strategies as st
    @given(st.booleans())
    def test_drawn(value): pass
    def test_quick(): pass
    @pytest.mark.slow
    def test_slow(): pass
"""


@pytest.mark.quick_cases("slow")
@pytest.mark.parametrize("asked", ["slow", "not slow"])
def test_what_is_drawn_is_among_the_slow_tests_and_the_quick_ones(lab, asked):
    lab.makeini("[pytest]\nmarkers = slow")
    lab.makepyfile(test_three=DRAWN)

    lab.runpytest_subprocess("-m", asked).assert_outcomes(passed=2, deselected=1)


def test_a_drawn_test_without_a_record_is_guessed_at_a_second(lab):
    lab.makeini("[pytest]\nmarkers = slow")
    lab.makepyfile(test_three=DRAWN)

    done = lab.runpytest_subprocess("-m", "slow", "--share=0/1", "--budget-s=20", "-v")

    assert "1 not run" in done.stdout.str()
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines("*::test_drawn PASSED*")


CASES = """
    import pytest
    @pytest.mark.quick_cases({names})
    @pytest.mark.parametrize("letter", ["a", "b", "c"])
    @pytest.mark.parametrize("number", [1, 2])
    def test_case(number, letter): pass
    def test_beside(): pass
"""


def test_cases_that_are_not_named_as_quick_are_slow(lab):
    lab.makeini("[pytest]\nmarkers = slow\n  quick_cases")
    lab.makepyfile(test_cases=CASES.format(names="'1-a', '*-c'"))

    lab.runpytest_subprocess("-m", "not slow").assert_outcomes(passed=4, deselected=3)
    lab.runpytest_subprocess("-m", "slow", "test_cases.py::test_case[2-b]").assert_outcomes(passed=1)


def test_a_quick_case_that_is_not_there_is_an_error_of_the_collection(lab):
    lab.makeini("[pytest]\nmarkers = slow\n  quick_cases")
    lab.makepyfile(test_cases=CASES.format(names="'1-a', '1-d'"))

    done = lab.runpytest_subprocess()

    assert done.ret == pytest.ExitCode.INTERRUPTED
    assert "test_case: quick_cases names 1-d, which no case is called" in done.stdout.str()


@pytest.mark.quick_cases("-n0")
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_tests_outside_the_budget_are_named_and_do_not_pass(lab, workers):
    lab.makepyfile(test_two="def test_first(): pass\ndef test_second(): pass")

    done = lab.runpytest_subprocess("--budget-s", "0", "--dist=loadfile", workers)

    assert "2 not run" in done.stdout.str()
    done.stdout.fnmatch_lines(["*2 tests of this share were not run*", "test_two.py::test_first", "*::test_second"])
    assert "passed" not in done.stdout.str()


GROUPED = """
    import pytest
    @pytest.mark.xdist_group("table")
    @pytest.mark.parametrize("n", range(2))
    def test_a_case(n): pass
"""


def test_a_group_is_left_out_as_a_whole_where_all_of_it_does_not_fit(lab):
    lab.makepyfile(test_table=GROUPED)

    # each of the two alone would fit, by the guess
    done = lab.runpytest_subprocess("--budget-s", "45")

    assert "2 not run" in done.stdout.str()


def test_what_a_group_shares_is_made_once_and_then_all_of_it_runs(lab):
    lab.makepyfile(test_table=GROUPED)

    lab.runpytest_subprocess("--budget-s", "75").assert_outcomes(passed=2)


@pytest.mark.quick_cases("-n0")
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_share_and_the_record_of_what_it_took_on_a_processor(lab, workers):
    lab.makepyfile(test_four=SPINNING)

    done = lab.runpytest_subprocess("--share", "1/2", "--write-seconds", "seconds.json", "--dist=loadfile", workers)

    done.assert_outcomes(passed=2)
    record = json.loads((lab.path / "seconds.json").read_text())
    assert set(record) == {"test_four.py::test_it"}
    # half a second of a child that has ended; nothing of what others do
    assert 0.5 <= record["test_four.py::test_it"] < 5


def test_a_malformed_share_ends_the_call_with_its_message(lab):
    done = lab.runpytest_subprocess("--share", "nonsense")

    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "expected TURN/N" in done.stderr.str()


@pytest.mark.parametrize(
    "options",
    [
        "--share=1/2 --budget-s=60",
        pytest.param("--write-seconds=seconds.json --list-skips=skips.txt", marks=pytest.mark.slow),
    ],
)
def test_a_call_without_paths_knows_the_options_of_the_folder_of_tests(pytester, options):
    pytester.makeini("[pytest]\ntestpaths = tests")
    (pytester.mkdir("tests") / "conftest.py").write_text(textwrap.dedent(LAB.format(tests=str(ROOT / "tests"))))
    (pytester.path / "tests" / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass")

    done = pytester.runpytest_subprocess(*options.split())

    assert done.ret == 0


def test_every_call_of_the_repository_gives_an_option_its_value_with_an_equals_sign():
    """A value that stands apart is taken for a path before the options are known, and `testpaths` is not read."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in (".ci/run", "Makefile", "CONTRIBUTING.md")]

    apart = re.findall(r"--(?:share|budget-s|write-seconds|known-skips|list-skips|unseen) \S+", "\n".join(texts))

    assert apart == []
