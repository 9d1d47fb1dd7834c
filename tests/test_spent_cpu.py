"""What is spent counts children that live, that have ended, and no others."""

import os
import subprocess
import sys

import pytest

from spent_cpu import spent_s

SPIN = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
GRANDCHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.mark.parametrize("program", [SPIN, GRANDCHILD])
def test_a_child_counts_while_it_lives_and_when_it_has_ended(program):
    before = spent_s()

    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        living = spent_s()
        child.stdin.close()
        child.wait()
    ended = spent_s()

    assert living - before >= 0.25
    # what has ended is not forgotten
    assert ended >= living - 0.05


def test_processes_of_others_do_not_count(tmp_path):
    def process(pid, parent, ticks):
        (tmp_path / str(pid)).mkdir()
        rest = f"S {parent} {' '.join(['0'] * 9)} {ticks} 0 0 0 20"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a name) with (brackets)) {rest}")

    process(1, 0, 1000)
    process(7, 1, 20)
    process(8, 7, 3)
    process(9, 1, 500)
    (tmp_path / "self").mkdir()
    (tmp_path / "10").mkdir()  # ended while it was looked at

    assert spent_s(7, tmp_path) == pytest.approx(23 / os.sysconf("SC_CLK_TCK"))
    assert spent_s(11, tmp_path) == 0
