"""An enclave keeps key and counters of each run apart: a second run of the same parties begins anew."""

from phalanx.train.parties.enclave_process import sealed_directory


def test_each_run_has_a_directory_of_its_own_which_is_the_same_after_a_restart(tmp_path):
    first, second = (sealed_directory(tmp_path, digest * 64) for digest in "ab")

    assert first != second and first == sealed_directory(tmp_path, "a" * 64)
    assert first.parent == second.parent == tmp_path


def test_the_directory_of_an_older_release_stays_that_of_its_run(tmp_path):
    (tmp_path / "sealed").mkdir()

    assert sealed_directory(tmp_path, "a" * 64) == tmp_path / "sealed"
