"""What a process may use is what its machine and its control groups leave it; their names say nothing to others."""

import pytest

from phalanx.pipeline.processes.own_memory import ALONE, available_memory, measure_own_memory, memory_name

GIB = 2**30


@pytest.fixture
def proc(tmp_path):
    """A machine with 8 GiB to spare, and a process in no control group."""
    root = tmp_path / "proc"
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "self").mkdir()
    (root / "sys/kernel/random/boot_id").write_text("boot\n")
    (root / "self/cgroup").write_text("0::/\n")
    return root


@pytest.fixture
def groups(tmp_path):
    path = tmp_path / "groups"
    path.mkdir()
    return path


def version_2(directory, limit, used, files=0):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\nactive_file 0\ninactive_file {files}\n")


def version_1(directory, limit, used, files=0):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"cache 9\ntotal_active_file {files}\ntotal_inactive_file 0\n")


def limits(proc, groups):
    """Bytes left in control groups, in order."""
    return sorted(size for name, size in available_memory(proc, groups, 8 * GIB).items() if name != "boot")


def test_without_control_groups_the_machine_has_what_is_available(proc, groups):
    assert available_memory(proc, groups, 8 * GIB) == {"boot": 8 * GIB}


def test_every_group_above_a_process_limits_it(proc, groups):
    (proc / "self/cgroup").write_text("0::/pod/worker\n")
    version_2(groups / "pod", 4 * GIB, 3 * GIB, files=GIB)
    version_2(groups / "pod/worker", "max", GIB)
    version_2(groups / "other", 1, 1)

    assert limits(proc, groups) == [2 * GIB]


def test_groups_of_version_1_count_too(proc, groups):
    (proc / "self/cgroup").write_text("5:cpu:/\n4:memory:/job\n0::/\n")
    version_1(groups / "memory", 2**63 - 4096, GIB)
    version_1(groups / "memory/job", 3 * GIB, GIB, files=GIB // 2)

    assert limits(proc, groups) == [2 * GIB + GIB // 2]


def test_in_a_container_the_mounted_group_is_its_own(proc, groups):
    (proc / "self/cgroup").write_text("0::/the/hosts/path\n")
    version_2(groups, 2 * GIB, GIB)

    assert limits(proc, groups) == [GIB]


def test_a_full_group_leaves_nothing_and_never_less(proc, groups):
    version_2(groups, GIB, 2 * GIB)

    assert limits(proc, groups) == [0]


def test_two_groups_have_two_names(proc, groups):
    version_2(groups / "one", GIB, 0)
    version_2(groups / "two", GIB, 0)
    names = []
    for path in ("one", "two", "two"):
        (proc / "self/cgroup").write_text(f"0::/{path}\n")
        names.append(set(available_memory(proc, groups, 8 * GIB)) - {"boot"})

    assert names[0] != names[1] == names[2]


def test_what_cannot_be_read_limits_nobody(proc, groups, tmp_path):
    version_2(groups, "nonsense", 1)

    assert limits(proc, groups) == []
    assert available_memory(tmp_path / "elsewhere", groups, 8 * GIB) == {}


def test_a_name_means_the_same_in_one_session_only():
    assert memory_name("run-1", "boot") == memory_name("run-1", "boot") != memory_name("run-2", "boot")
    assert "boot" not in memory_name("run-1", "boot")


def test_processes_here_share_this_machine_and_nobody_gives_all_of_it():
    one, other = measure_own_memory("run"), measure_own_memory("run")

    assert one.keys() == other.keys()
    assert all(size > 0 for size in one.values())
    assert measure_own_memory("another run").keys().isdisjoint(one)


def test_what_a_worker_file_says_is_for_that_worker_alone():
    assert measure_own_memory("run", memory_mib=3) == {ALONE: 3 * 2**20}
