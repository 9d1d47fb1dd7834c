"""Workers behind signed frames: over a network in memory, and as processes of their own with mutual TLS."""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from masked_worlds import a_desk, a_model, lm_loss, some_ids
from torch import nn

from phalanx.cli import run_command
from phalanx.config import dump_toml
from phalanx.errors import FrameError, PeerLostError, TransportError, WrongProductError
from phalanx.security.crypto import Identity, create_authority, issue_certificate, load_identity
from phalanx.security.mask import MaskedMessage, MaskedWorker, P, ProductMessage
from phalanx.split.masked import (
    MaskedLinear,
    MaskedWorkerConfig,
    RemoteWorker,
    SimulatedWorker,
    local_masked_workers,
    mask_linears,
    remote_workers,
)
from phalanx.split.masked.answers import AnswerSorter
from phalanx.split.masked.idle import PadFiller
from phalanx.split.masked.messages import (
    END,
    LOAD,
    PRODUCT,
    REFUSED,
    load_parts,
    numbers_of_frame,
    read_load,
    read_masked,
    write_masked,
)
from phalanx.split.masked.serving import ProductService
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import Endpoint, OwnerLink, TransportConfig

LIMITS = TransportConfig(timeout_s=20.0, max_frame_bytes=2 * 2**20, max_queued_bytes=4 * 2**20)
SHORT = LIMITS.model_copy(update={"timeout_s": 1.0})
RUN = "run-1"
FORWARD = ProductMessage("layer", "forward")
X = torch.randn(8, 24, generator=torch.Generator().manual_seed(2))


def a_linear(inner=24, columns=16):
    torch.manual_seed(1)
    return nn.Linear(inner, columns).requires_grad_(False)


@contextmanager
def in_memory(multiplier=None, limits=LIMITS, serve=True, max_bytes=None):
    """A trusted side and a worker in one process, with real frames between them."""
    network = MemoryNetwork()
    names = ("owner", "worker")
    identities = {name: Identity.without_certificate(name) for name in names}
    peers = {name: identity.public for name, identity in identities.items()}
    ends = {name: Endpoint(identities[name], peers, RUN, network.wire_for(name), limits) for name in names}
    answers = AnswerSorter(ends["owner"])
    service = ProductService(ends["worker"], multiplier or MaskedWorker("cpu", numbers_of_frame(limits)), max_bytes)
    link = OwnerLink(ends["worker"], "owner", 60.0, lambda: RUN)
    thread = threading.Thread(target=service.serve_link, args=(link,), daemon=True)
    if serve:
        thread.start()
    try:
        yield RemoteWorker("worker", ends["owner"], answers, limits), ends
    finally:
        ends["owner"].send_frame("worker", END, {})
        if serve:
            thread.join(10.0)
        answers.close()
        for end in ends.values():
            end.close()


def test_a_worker_behind_frames_gives_the_same_bits_as_one_in_this_process():
    expected = MaskedLinear(a_linear(), "layer", a_desk(SimulatedWorker()))(X)

    with in_memory() as (worker, _):
        found = MaskedLinear(a_linear(), "layer", a_desk(worker, rows=3))(X)

    assert torch.equal(found, expected)


def test_a_matrix_larger_than_a_frame_travels_in_parts():
    small = LIMITS.model_copy(update={"max_frame_bytes": 8192})

    with in_memory(limits=small) as (worker, ends):
        found = MaskedLinear(a_linear(200, 48), "layer", a_desk(worker, rows=4))(torch.ones(4, 200))
        received = ends["worker"].bytes_received["owner"]

    assert torch.allclose(found, a_linear(200, 48)(torch.ones(4, 200)), atol=1e-2)
    assert received > 2 * 2 * 200 * 48


def test_a_row_larger_than_a_frame_is_refused_with_the_key_to_raise():
    with pytest.raises(FrameError, match=r"^layer, forward: a row takes 96 bytes, frames have 95; raise max_frame_by"):
        load_parts(FORWARD, np.ones((2, 48), np.int32), 95)


def test_requests_larger_than_a_frame_are_cut_into_fewer_rows():
    small, layer = LIMITS.model_copy(update={"max_frame_bytes": 8192}), a_linear(200, 48)
    x = torch.randn(30, 200, generator=torch.Generator().manual_seed(2))

    with in_memory(limits=small) as (worker, ends):
        found = MaskedLinear(layer, "layer", a_desk(worker, rows=4096))(x)
        ends["owner"].flush_frames(5.0)

        assert worker.bytes_sent > 4 * 30 * 200
        assert worker.bytes_received > 4 * 30 * 48
    assert torch.allclose(found, layer(x), atol=1e-2)


def test_what_crosses_is_read_as_it_was_written():
    rng = np.random.default_rng(1)
    matrix = rng.integers(-(2**15) + 1, 2**15, (10, 7)).astype(np.int32)
    masked = MaskedMessage(FORWARD, 12, rng.integers(0, P, (5, 3), dtype=np.uint32))

    parts = [read_load(body, payload) for body, payload in load_parts(FORWARD, matrix, 4 * 14)]
    again = read_masked(*write_masked(masked))

    assert [about.first for about, _ in parts] == [0, 4, 8]
    assert np.array_equal(np.concatenate([rows for _, rows in parts]), matrix)
    assert (again.product, again.number) == (FORWARD, 12)
    assert np.array_equal(again.values, masked.values)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 6},
        {"rows": 0},
        {"columns": "3"},
        {"number": -1},
        {"number": 1.0},
        {"direction": "sideways"},
        {"layer": ""},
        {"more": 1},
    ],
)
def test_a_malformed_message_is_refused(change):
    body, payload = write_masked(MaskedMessage(FORWARD, 12, np.zeros((5, 3), np.uint32)))

    with pytest.raises(FrameError):
        read_masked(body | change, payload)


def test_a_matrix_that_needs_more_than_sixteen_bits_is_not_cut_down():
    with pytest.raises(FrameError, match="needs more than 16 bits"):
        load_parts(FORWARD, np.full((2, 2), 2**15, np.int32), 1000)


def test_a_request_for_what_is_not_loaded_ends_the_link_with_its_reason():
    with in_memory() as (worker, _):
        with pytest.raises(FrameError, match="worker: has no answer: layer, forward: is not loaded here"):
            worker.multiply_masked([MaskedMessage(FORWARD, 1, np.zeros((1, 2), np.uint32))])
        with pytest.raises(FrameError, match="has no answer"):
            worker.multiply_masked([MaskedMessage(FORWARD, 2, np.zeros((1, 2), np.uint32))])


def test_rows_of_a_matrix_that_come_out_of_order_are_refused():
    (_, _), (body, payload) = load_parts(FORWARD, np.ones((2, 4), np.int32), 8)

    with in_memory() as (worker, ends):
        ends["owner"].send_frame("worker", LOAD, body, [payload])
        with pytest.raises(FrameError, match="came out of order"):
            worker.multiply_masked([MaskedMessage(FORWARD, 1, np.zeros((1, 2), np.uint32))])


def reason_of(worker, ends, *loads):
    """Why a worker has no answer after some parts of matrices."""
    for body, payload in loads:
        ends["owner"].send_frame("worker", LOAD, body, [payload])
    with pytest.raises(FrameError) as caught:
        worker.multiply_masked([MaskedMessage(FORWARD, 1, np.zeros((1, 2), np.uint32))])
    return str(caught.value)


def first_row(inner, columns, layer="layer"):
    """The first part of a matrix that claims more rows than come."""
    ((body, payload),) = load_parts(ProductMessage(layer, "forward"), np.ones((1, columns), np.int32), 2 * columns)
    return {**body, "inner": inner}, payload


def test_an_owner_that_claims_a_matrix_of_terabytes_gets_a_refusal():
    """Before, the worker's process ended by MemoryError, or took what the machine had."""
    with in_memory(max_bytes=2**20) as (worker, ends):
        # no machine has so much
        said = reason_of(worker, ends, first_row(2**21, 2**19))

        assert "with 2097152 x 524288 numbers all matrices take" in said
        assert "this worker gives 1048576; raise memory_mib in its file" in said


def test_many_matrices_have_no_more_memory_than_one():
    """Each would fit alone; also those that never become complete count."""
    with in_memory(max_bytes=2**20) as (worker, ends):
        said = reason_of(worker, ends, *(first_row(100, 200, f"layer {number}") for number in range(3)))

        assert said.startswith("worker: has no answer: layer 2, forward: with 100 x 200 numbers all matrices take 1")


def test_a_matrix_that_comes_again_takes_no_memory_again():
    with in_memory() as (worker, ends):
        assert "layer, forward: came before; a matrix is" in reason_of(worker, ends, *[first_row(3, 2)] * 2)


def test_an_owner_that_asks_for_a_product_beyond_a_frame_gets_a_refusal():
    """A column and a row are two frames, and their product has half a terabyte."""
    wide = np.ones((1, 2**19), np.int32)
    with in_memory() as (worker, _):
        worker.load_matrix(FORWARD, wide)
        with pytest.raises(FrameError, match=r"the product has 262144 x 524288 numbers, expected 523264 at most; ask"):
            worker.multiply_masked([MaskedMessage(FORWARD, 1, np.zeros((2**18, 1), np.uint32))])


def test_a_liar_behind_frames_is_named():
    class LyingWorker(MaskedWorker):
        def answer_request(self, request):
            answer = super().answer_request(request)
            answer.values[0, 0] = (int(answer.values[0, 0]) + 1) % P
            return answer

    with in_memory(LyingWorker()) as (worker, _):
        masked = MaskedLinear(a_linear(), "layer", a_desk(worker))
        with pytest.raises(WrongProductError, match=r"^worker: layer, forward, pad \d+: is not the product"):
            masked(X)


def test_a_silent_worker_is_given_up_after_the_deadline():
    with in_memory(limits=SHORT, serve=False) as (worker, _):
        masked = MaskedLinear(a_linear(), "layer", a_desk(worker))
        with pytest.raises(PeerLostError, match=r"^worker: did not answer 1 requests in 1 s"):
            masked(X)


def test_answers_that_nobody_asked_for_are_not_kept_and_do_not_stand_for_others():
    request = MaskedMessage(FORWARD, 5, np.zeros((1, 2), np.uint32))

    with in_memory(limits=SHORT, serve=False) as (worker, ends):
        for number in (4, 6):
            body, payload = write_masked(MaskedMessage(FORWARD, number, np.zeros((1, 2), np.uint32)))
            ends["worker"].send_frame("owner", PRODUCT, body, [payload])
        with pytest.raises(PeerLostError, match="did not answer 1 requests"):
            worker.multiply_masked([request])


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (PRODUCT, {}, "malformed numbers"),
        (REFUSED, {"reason": "a\nb"}, r"worker: has no answer: a\?b"),
        ("mask.hello", {}, "sent 'mask.hello', which is no answer"),
    ],
)
def test_nonsense_instead_of_an_answer_is_the_workers_fault(kind, body, said):
    with in_memory(serve=False) as (worker, ends):
        ends["worker"].send_frame("owner", kind, body)
        with pytest.raises(FrameError, match=said):
            worker.multiply_masked([MaskedMessage(FORWARD, 5, np.zeros((1, 2), np.uint32))])


def test_an_answer_with_other_rows_is_refused():
    class ShortWorker(MaskedWorker):
        def answer_request(self, request):
            answer = super().answer_request(request)
            return MaskedMessage(answer.product, answer.number, answer.values[:1])

    with in_memory(ShortWorker()) as (worker, _):
        masked = MaskedLinear(a_linear(), "layer", a_desk(worker))
        with pytest.raises(FrameError, match="1 rows came, expected 8"):
            masked(X)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pki") / "keys"
    create_authority(directory)
    for name in ("owner", "mask-1", "mask-2"):
        issue_certificate(directory, name)
    return directory


def processes(keys, directory):
    return local_masked_workers(directory, keys, LIMITS)


def test_two_worker_processes_serve_a_training_step_and_end_in_good_order(cache, keys, tmp_path):
    ids, found = some_ids(), []
    local = a_model(cache)
    mask_linears(local, a_desk())
    started = processes(keys, tmp_path)
    with remote_workers(load_identity(keys / "owner"), ("mask-1", "mask-2"), RUN, LIMITS, started) as workers:
        remote = a_model(cache, recompute=True)
        offload = a_desk(workers["mask-1"], second=workers["mask-2"])
        mask_linears(remote, offload)
        with PadFiller(offload, reserve=1):
            for stage in (local, remote):
                lm_loss(stage(ids), ids).backward()
                found.append([value.grad for value in stage.trainable_parameters().values()])
        alive = [started.is_running(name) for name in workers]

    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    assert alive == [True, True]
    assert [started.last_log_line(name) for name in workers] == ["(no output)", "(no output)"]
    assert not any(started.is_running(name) for name in workers)


def test_a_worker_process_that_is_killed_stops_the_step_and_is_named(keys, tmp_path):
    started = processes(keys, tmp_path)
    with (
        pytest.raises(TransportError, match="mask-1: "),
        remote_workers(load_identity(keys / "owner"), ("mask-1",), RUN, LIMITS, started) as workers,
    ):
        masked = MaskedLinear(a_linear(), "layer", a_desk(workers["mask-1"]))
        assert masked(X).shape == (8, 16)
        os.kill(started.process_id("mask-1"), signal.SIGKILL)
        for _ in range(100):
            masked(X)


def test_a_worker_process_ends_with_its_trusted_side(keys, tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from phalanx.security.crypto import load_identity;"
        "from phalanx.split.masked import local_masked_workers, remote_workers;"
        "from phalanx.transport import TransportConfig; keys = Path(sys.argv[1]);"
        "started = local_masked_workers(Path(sys.argv[2]), keys, TransportConfig());"
        "way = remote_workers(load_identity(keys / 'owner'), ('mask-1',), 'run-1', TransportConfig(), started);"
        "way.__enter__(); print(started.process_id('mask-1'), flush=True); time.sleep(60)"
    )
    side = subprocess.Popen([sys.executable, "-c", program, str(keys), str(tmp_path)], stdout=subprocess.PIPE)
    worker = int(side.stdout.readline())
    handle = os.pidfd_open(worker)

    side.kill()
    side.wait(120.0)
    side.stdout.close()

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(10_000)
    os.close(handle)


def test_the_command_line_refuses_a_worker_file_that_is_wrong(tmp_path, capsys):
    path = tmp_path / "worker.toml"
    path.write_text(dump_toml(MaskedWorkerConfig(identity="keys", owner="127.0.0.1:1")) + 'devise = "cuda"\n')

    assert run_command(["masked-worker", str(path)]) == 2
    assert "devise" in capsys.readouterr().err


def test_a_foreign_worker_is_not_let_in(keys, tmp_path):
    create_authority(tmp_path / "foreign")
    issue_certificate(tmp_path / "foreign", "mask-1")
    started = local_masked_workers(tmp_path / "workers", tmp_path / "foreign", LIMITS)

    with (
        pytest.raises(PeerLostError, match="mask-1: ended before it joined"),
        remote_workers(load_identity(keys / "owner"), ("mask-1",), RUN, LIMITS, started),
    ):
        raise AssertionError("was let in")
