"""Real runs with a real fault end with a card of the right cause; watchers that hang change no bit of a run."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
from real_runs import FORWARD_LIAR, descendant, local_workers, worker_pid
from test_federated_processes import rounds_place

from phalanx.telemetry import read_metrics

sys.path.append(str(Path(__file__).parents[1] / "watch"))
from alert_servers import hanging_server, http_receiver

pytestmark = pytest.mark.slow


def card_of(place):
    """The card that the run left, as a program reads it, beside the printed one."""
    process = place.start("watch", str(place.path / "run"), "--card", "--json")
    assert process.wait() == 0, process.text
    line = next(line for line in reversed(process.text.splitlines()) if line.startswith("{"))
    (card,) = json.loads(line)["cards"].values()
    return card


def test_a_worker_that_is_killed_is_on_the_card_of_the_run_that_went_on(place):
    process = place.train()
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    os.kill(worker_pid(process, "worker-1"), signal.SIGKILL)

    assert process.wait() == 0, process.text

    card = card_of(place)
    assert (card["cause"], card["party"], card["last_good_step"]) == ("killed_party", "worker-1", 7)
    assert "cause            killed_party" in process.text
    assert "killed_party" in (place.path / "run" / "post_mortem.md").read_text()


def test_a_worker_that_stands_still_is_silent_on_the_card(place):
    process = place.train("pipeline.patience_s=1.0")
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 2,'))
    os.kill(worker_pid(process, "worker-2"), signal.SIGSTOP)

    assert process.wait() == 0, process.text

    card = card_of(place)
    assert (card["cause"], card["party"]) == ("silent_party", "worker-2")


def test_a_liar_is_on_the_card_with_what_to_do_about_it(place):
    place.finish(*FORWARD_LIAR, "guard.audit_rate=1.0")

    card = card_of(place)

    assert (card["cause"], card["party"]) == ("convicted_party", "worker-1")
    assert "--revoke worker-1" in card["next_command"]


def test_an_owner_that_is_killed_leaves_files_from_which_the_card_is_made(place):
    process = place.train()
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    process.kill()

    card = card_of(place)

    assert (card["cause"], card["status"]) == ("killed_owner", "gone")
    assert card["checkpoint"] == 3
    assert card["next_command"].endswith("--resume")


def test_sites_of_a_round_that_failed_are_on_the_card_with_their_stacks(tmp_path):
    place = rounds_place(tmp_path)
    process = place.train("federated.min_cohort=4", "federated.respawns=0", "train.steps=100000")
    place.wait_for(process, lambda: place.has_line("rounds.jsonl", '"round": 2,'))
    os.kill(descendant(process, "site_process", "north.toml"), signal.SIGKILL)

    assert process.wait() not in (0, 130), process.text

    stacks = card_of(place)["stacks"]
    assert {"south", "west", "east"} <= set(stacks), stacks
    assert any("loopback_site.py" in line for line in stacks["south"]), stacks["south"]


def test_a_full_disk_is_the_cause(place):
    process = place.train(restriction="no_large_files")

    assert process.wait() == 3, process.text

    card = card_of(place)
    assert (card["cause"], card["status"]) == ("full_disk", "failed")
    assert card["stacks"]["owner"]
    assert "cause            full_disk" in process.text


def test_a_worker_without_memory_is_on_the_card_by_its_name(place):
    """The kernel allows a worker 64 MiB more (``RLIMIT_AS``) before it has its stage.

    Later would be too late: a worker keeps the memory of its peak (`keep_freed_memory`).
    """
    process = place.train("model.architecture.n_embd=512", "train.steps=4")
    log = place.path / "run" / "events.jsonl"
    place.wait_for(process, lambda: log.exists() and "party_joined" in log.read_text())
    pid = worker_pid(process, "worker-2")
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() + (64 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))

    process.wait()

    card = card_of(place)
    assert (card["cause"], card["party"]) == ("out_of_memory", "worker-2"), process.text
    assert "cause            out_of_memory" in process.text
    assert card["stacks"]["worker-2"]


def test_numbers_that_are_none_are_the_cause(place):
    process = place.train("optimizer.lr=1e30")

    assert process.wait() == 6, process.text

    card = card_of(place)
    assert card["cause"] == "non_finite"
    assert "optimizer.lr" in card["next_command"]


def test_a_checkpoint_that_was_altered_is_the_cause(place):
    process = place.train()
    place.wait_for(process, (place.path / "run" / "checkpoints" / "step-00000003").exists)
    process.kill()
    shards = [path for path in (place.path / "run" / "checkpoints" / "step-00000003").rglob("*") if path.is_file()]
    shard = max(shards, key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)

    process = place.train(resume=True)

    assert process.wait() == 3, process.text
    assert card_of(place)["cause"] == "bad_checkpoint"


def test_watchers_that_hang_change_no_bit_of_a_run(place, clean):
    """The collector and the webhook take connections and never answer; the watcher is killed in the middle."""
    with hanging_server() as port:
        file = place.path / "watch.toml"
        file.write_text(
            f'[traces]\nendpoint = "http://127.0.0.1:{port}/v1/traces"\n'
            f'[alerts]\nwebhook = "http://127.0.0.1:{port}/x"\ntimeout_s = 5.0\n[alerts.memory]\nmax_share = 0.0001\n'
        )
        process = place.train()
        place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 0,'))
        # the owner stands still until somebody watches
        os.kill(process.popen.pid, signal.SIGSTOP)
        watcher = place.start("watch", str(place.path / "run"), "--config", str(file), "--prometheus", "0")
        place.wait_until(lambda: "alert memory of this machine" in watcher.text)
        os.kill(process.popen.pid, signal.SIGCONT)
        place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 5,'))
        watcher.kill()
        assert process.wait() == 0, process.text

    summary = place.summary()
    for key in ("final_weights_digest", "loss_first", "loss_last", "audits", "status", "validation_perplexity"):
        assert summary[key] == clean[key], key
    assert [line["step"] for line in read_metrics(place.path / "run" / "metrics.jsonl")] == list(range(8))
    assert not local_workers(process)


def test_a_step_is_one_trace_with_the_spans_of_every_worker(place):
    """A real run, a real watcher, and a collector that reads OTLP; workers send nothing but their signed reports."""
    collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    place.finish()
    spans = []
    with http_receiver() as (url, posts):
        file = place.path / "watch.toml"
        file.write_text(f'[traces]\nendpoint = "{url}/v1/traces"\n')
        watcher = place.start("watch", str(place.path / "run"), "--config", str(file), "--no-page", "--prometheus", "0")

        def has_all():
            while not posts.empty():
                request = collector.ExportTraceServiceRequest.FromString(posts.get()[2])
                spans.extend(span for each in request.resource_spans for s in each.scope_spans for span in s.spans)
            return sum(span.name == "phalanx.party" for span in spans) >= 8 * 2

        place.wait_until(has_all)
        watcher.kill()

    traces = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == 8
    for members in traces.values():
        (root,) = (span for span in members if not span.parent_span_id)
        assert root.name == "phalanx.step"
        parties = [span for span in members if span.name == "phalanx.party"]
        assert all(span.parent_span_id == root.span_id for span in parties)
        names = {item.value.string_value for span in parties for item in span.attributes if item.key == "phalanx.party"}
        assert names == {"worker-1", "worker-2"}
        computing = {span.parent_span_id for span in members if span.name == "phalanx.phase.compute"}
        assert {span.span_id for span in parties} <= computing
