"""What this user may not read or write is said with its path and a cure that fits, never as a full disk."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.cli.answers.ending import exit_code_of
from phalanx.errors import writing_cure

SOURCE = Path(phalanx.__file__).resolve().parents[1]
SETPRIV = shutil.which("setpriv")
RECIPE = """\
tokenizer = { kind = "bpe", vocab_size = 300 }
[[sources]]
kind = "text"
path = "texts"
licence = "mine"
"""


def refuse(code, name="ds/dataset.json"):
    def act():
        raise OSError(code, os.strerror(code), name)

    return act


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOSPC, errno.EROFS])
def test_a_file_that_the_system_refuses_is_one_message(code, capsys):
    assert exit_code_of(refuse(code)) == 3

    told = capsys.readouterr().err
    assert told.startswith(f"error: ds/dataset.json: {os.strerror(code)}; ")
    assert ("free space" in told) == (code == errno.ENOSPC)
    assert ("permissions" in told) == (code in (errno.EACCES, errno.EPERM))


@pytest.mark.parametrize(("code", "name"), [(errno.EBADF, "ds"), (errno.EACCES, None)])
def test_what_is_no_refusal_of_a_file_stays_a_bug(code, name):
    with pytest.raises(OSError, match=os.strerror(code)):
        exit_code_of(refuse(code, name))


def test_a_permission_is_not_told_as_a_full_disk():
    cures = {code: writing_cure(OSError(code, "")) for code in (errno.EACCES, errno.ENOSPC, errno.EROFS, errno.ENOTDIR)}

    assert "change its permissions" in cures[errno.EACCES] and "free" not in cures[errno.EACCES]
    assert "free space" in cures[errno.ENOSPC] and "allow" not in cures[errno.ENOSPC]
    assert "free" not in cures[errno.EROFS] + cures[errno.ENOTDIR]


def plainly(home, *words):
    """Run a command as a user that permissions count for."""
    command = [sys.executable, "-m", "phalanx", *words]
    if os.geteuid() == 0:
        dropped = "-dac_override,-dac_read_search,-fowner"
        command = [SETPRIV, f"--bounding-set={dropped}", "--inh-caps=-all", *command]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PHALANX_CACHE": str(home / "cache")}
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)


def test_names_and_texts_that_are_no_utf8_are_one_message(tmp_path):
    (tmp_path / "caf\udce9").mkdir()
    (tmp_path / "caf\udce9/a.txt").write_text("rivers and hills")
    strict = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "phalanx"]

    init = subprocess.run(
        [*command, "init", "run.toml", "--kind", "scratch", "--data", "caf\udce9"],
        cwd=tmp_path, env=strict, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    join = subprocess.run([*command, "join", "-"], input=b"caf\xe9\n", env=strict, capture_output=True, check=False)

    assert init.returncode == 3
    assert init.stderr.startswith("error: run.toml: cannot be written (a name in it is not UTF-8); rename the files")
    assert not (tmp_path / "run.toml").exists()
    assert join.returncode not in (0, 1)
    assert join.stderr.startswith(b"error: ") and b"Traceback" not in join.stderr


@pytest.mark.skipif(os.geteuid() == 0 and SETPRIV is None, reason="root may do everything, and setpriv is missing")
@pytest.mark.parametrize("closed", ["texts", "texts/inner", "texts/one.txt", "out", "out/.work", "above"])
def test_a_build_says_what_it_may_not_open(closed, tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    for folder in ("texts/inner", "out/.work", "above"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("one", "two", "inner/three"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"text {name} of rivers and hills\n" * 5)
    (tmp_path / closed).chmod(0)
    try:
        ended = plainly(tmp_path, "data", "build", "r.toml", "--out", "above/ds" if closed == "above" else "out")
    finally:
        (tmp_path / closed).chmod(0o755)

    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr
    assert closed in ended.stderr and "Permission denied" in ended.stderr and "space" not in ended.stderr
