"""Lines of the audit log that only machines elsewhere know any more: a resumed run is refused without them."""

import json
import shutil
import signal

import pytest
from real_runs import events, free_port

from phalanx.security.crypto import create_authority, issue_certificate

WORKERS = ("north", "south")
HASTY = "[transport]\nkeepalive_s = 1.0\ntimeout_s = 8.0\n"


@pytest.fixture
def company(place):
    """An owner's settings, and what starts both workers; each has a machine, which is a directory here."""
    keys, port, files = place.path / "keys", free_port(), []
    create_authority(keys)
    for name in ("owner", *WORKERS):
        issue_certificate(keys, name)
    for name in WORKERS:
        shutil.move(keys / name, place.path / name)
        (keys / name).mkdir()
        shutil.copy(place.path / name / "certificate.pem", keys / name)
        path = place.path / f"{name}.toml"
        path.write_text(f"identity = '{place.path / name}'\nowner = '127.0.0.1:{port}'\n{HASTY}")
        files.append(str(path))
    settings = (
        f"pipeline.remote_workers={json.dumps(list(WORKERS))}",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.port={port}",
        "pipeline.transport.keepalive_s=1.0",
        "train.steps=16",
    )
    return settings, lambda: [place.start("worker", file) for file in files]


def attack(run_dir):
    """Cut half of the log away, and remove everything in the owner's directory that has seen the rest of it."""
    log = run_dir / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[: len(lines) // 2]))
    for name in ("checkpoints", "journal"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / "secrets" / "audit.head").unlink()
    (run_dir / "summary.json").unlink()
    return len(lines)


def heads(place):
    return [json.loads(path.read_bytes()) for name in WORKERS for path in (place.path / name / "log_heads").iterdir()]


def snapshot(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".toml"}


# in one process `test_log_memory.py` is the quick one of this kind
@pytest.mark.slow
def test_a_log_of_which_half_was_cut_away_everywhere_is_missed_by_machines_elsewhere(place, company):
    settings, start = company
    workers = start()
    owner = place.train(*settings)
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 7,'))
    owner.popen.send_signal(signal.SIGINT)
    assert owner.wait() == 130, owner.text
    assert [worker.wait() for worker in workers] == [4, 4], [worker.text for worker in workers]
    known = heads(place)
    whole = (place.path / "run" / "events.jsonl").read_bytes()
    assert max(head["last"]["number"] for head in known) >= 7, known

    attack(place.path / "run")
    public = [kind for kind, _ in events(place, "run_started", "step", "evicted")]
    before = snapshot(place.path / "run")
    workers = start()
    owner = place.train(*settings, resume=True)

    assert owner.wait() == 5, owner.text
    said = " ".join(owner.text.split())
    assert f"the audit log has {len(public)} of the " in said
    assert "lines about sessions, steps and evictions that" in said
    assert "restore the whole run directory" in said
    assert "Traceback" not in owner.text
    # not a byte of the owner's records was touched, so that what belongs there can be put back
    after = snapshot(place.path / "run")
    of_the_moment = {place.path / "run" / name for name in ("address", "peers.json")}
    assert {path for path in before if before[path] != after.get(path)} <= of_the_moment
    for worker in workers:
        if worker.popen.poll() is None:
            worker.kill()

    # the defence off: machines that remember nothing; the attacker wins, and the run heals without a word
    cut = {path: path.read_bytes() for path in before}
    for name in WORKERS:
        shutil.rmtree(place.path / name / "log_heads")
    workers = start()
    summary = place.finish(*settings, resume=True)
    assert [worker.wait() for worker in workers] == [0, 0], [worker.text for worker in workers]
    assert summary["status"] == "completed"
    assert cut[place.path / "run" / "events.jsonl"] in whole
    assert (place.path / "run" / "events.jsonl").read_bytes().startswith(cut[place.path / "run" / "events.jsonl"])
