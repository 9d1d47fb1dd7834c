"""What the host between client and enclave can do: everything in a plaintext split, nothing but stop a sealed one."""

import pytest
import torch
from split_scene import SEQ, batch_of, make_scene, same, train

from phalanx.errors import FrameError, SealError
from phalanx.testing import SplitSimulator


class Recorder:
    """Passes everything on and keeps a copy."""

    def __init__(self):
        self.seen = []

    def __call__(self, crossing):
        self.seen.append(crossing)
        return (crossing.frame,)

    def frames(self, name):
        return [one.frame for one in self.seen if one.name == name]


class Meddler:
    """Puts something else in the place of one kind of frame, at the first attempt only or always."""

    def __init__(self, name, change, *, always=False, microbatch=1):
        self.name, self.change, self.always, self.microbatch = name, change, always, microbatch
        self.meddled = 0

    def __call__(self, crossing):
        is_meant = crossing.name == self.name and crossing.microbatch == self.microbatch
        if not is_meant or (crossing.attempt and not self.always):
            return (crossing.frame,)
        self.meddled += 1
        return self.change(crossing.frame)


def flip(position):
    def change(frame):
        altered = bytearray(frame)
        altered[position] ^= 0x40
        return (bytes(altered),)

    return change


def test_the_host_of_a_plaintext_split_reads_activations_and_labels_and_of_a_sealed_one_neither(source):
    batch = batch_of(0)
    plain, sealed = (SplitSimulator(make_scene(source, mode), host=Recorder()) for mode in ("plaintext", "sealed"))

    for simulator in (plain, sealed):
        simulator.step(batch)

    for number, (ids, labels) in enumerate(batch):
        hidden, wanted = plain.front(ids).numpy().tobytes(), labels.numpy().tobytes()
        assert plain.host.frames("cut.train")[number].endswith(hidden)
        assert plain.host.frames("labels.train")[number].endswith(wanted)
        assert hidden[:16] not in b"".join(one.frame for one in sealed.host.seen)
        assert wanted[:16] not in b"".join(one.frame for one in sealed.host.seen)


def test_a_changed_activation_bends_the_weights_of_a_plaintext_split_and_nobody_notices(source):
    honest = SplitSimulator(make_scene(source, "plaintext"))
    bent = SplitSimulator(make_scene(source, "plaintext"), host=Meddler("cut.train", flip(-2), always=True))

    train(honest, 1)
    train(bent, 1)

    assert bent.host.meddled == 1
    assert not same(honest.copy_adapters(), bent.copy_adapters())


def test_a_changed_label_teaches_a_plaintext_split_what_the_host_wants(source):
    target = torch.full((1, SEQ), 5).numpy().tobytes()
    poison = Meddler("labels.train", lambda frame: (frame[: -len(target)] + target,), always=True)
    honest, bent = SplitSimulator(make_scene(source, "plaintext")), SplitSimulator(make_scene(source, "plaintext"))
    bent.host = poison

    assert train(honest, 2) != train(bent, 2)


class Onslaught:
    """Lets a frame through only after every spoilt one; a side that takes a spoilt one never sees the end of them."""

    def __init__(self, spoil):
        self.spoil, self.spoilt, self.passed = spoil, 0, 0

    def __call__(self, crossing):
        for position in range(len(crossing.frame)):
            self.spoilt += 1
            yield self.spoil(crossing.frame, position)
        self.passed += 1
        yield crossing.frame


def flipped(frame, position):
    (altered,) = flip(position)(frame)
    return altered


def truncated(frame, position):
    return frame[:position]


def lengthened(frame, position):
    return frame + bytes(position + 1)


@pytest.mark.parametrize(
    "spoil", [flipped, *(pytest.param(one, marks=pytest.mark.slow) for one in (truncated, lengthened))]
)
def test_every_byte_of_every_frame_counts_and_nothing_is_lost(source, spoil):
    simulator, honest = SplitSimulator(make_scene(source)), SplitSimulator(make_scene(source))
    simulator.host = Onslaught(spoil)

    losses = train(simulator, 1)

    # activations and labels of four microbatches, and two results
    assert simulator.host.passed == 10
    assert simulator.host.spoilt > 10 * 100
    simulator.host = honest.host
    assert [*losses, *train(simulator, 1, first=1)] == train(honest, 2)
    assert same(simulator.copy_adapters(), honest.copy_adapters())


def test_replayed_frames_are_refused_and_the_due_one_is_taken(source):
    simulator, honest, recorder = SplitSimulator(make_scene(source)), SplitSimulator(make_scene(source)), Recorder()
    simulator.host = recorder
    first = train(simulator, 1)

    old = [one.frame for one in recorder.seen]
    simulator.host = lambda crossing: (*old, crossing.frame)

    assert [*first, *train(simulator, 1, first=1)] == train(honest, 2)
    assert same(simulator.copy_adapters(), honest.copy_adapters())


def test_without_seals_a_replayed_microbatch_of_the_same_step_is_learned_twice(source):
    honest, bent = SplitSimulator(make_scene(source, "plaintext")), SplitSimulator(make_scene(source, "plaintext"))
    stock = {}

    def replay(crossing):
        # the host writes another number on a frame that it has seen
        if crossing.name == "cut.train" and crossing.microbatch == 2:
            return (crossing.frame[:16] + stock["cut.train"][16:],)
        if crossing.name == "labels.train" and crossing.microbatch == 2:
            return (crossing.frame[:16] + stock["labels.train"][16:],)
        stock.setdefault(crossing.name, crossing.frame)
        return (crossing.frame,)

    bent.host = replay

    assert train(bent, 1) != train(honest, 1)


def test_frames_in_another_order_are_refused_and_the_step_is_done_all_the_same(source):
    simulator, honest, recorder = SplitSimulator(make_scene(source)), SplitSimulator(make_scene(source)), Recorder()
    client = simulator.clients["client-0"]
    packed = client.pack_microbatch("train", 0, 0, *batch_of(0)[0])

    with pytest.raises(SealError) as refusal:
        simulator.enclave.take_frame("client-0", "train", 0, 1, packed.frames[1])
    simulator.enclave.take_frame("client-0", "train", 0, 1, packed.frames[0])
    simulator.enclave.take_frame("client-0", "train", 0, 1, packed.frames[1])

    assert refusal.value.reason == "out_of_order"
    assert simulator.enclave.due_microbatch == ("client-1", 1)
    simulator.meet_clients()
    simulator.host = recorder
    assert train(simulator, 1) == train(honest, 1)


def test_a_frame_of_another_client_is_refused(source):
    simulator = SplitSimulator(make_scene(source))
    other = simulator.clients["client-1"].pack_microbatch("train", 0, 0, *batch_of(0)[0])

    with pytest.raises(SealError):
        simulator.enclave.take_frame("client-0", "train", 0, 1, other.frames[0])
    with pytest.raises(FrameError, match="due is 0 of client-0"):
        simulator.enclave.take_frame("client-1", "train", 0, 1, other.frames[0])


def test_a_measurement_that_is_passed_off_as_training_is_refused(source):
    simulator = SplitSimulator(make_scene(source))
    packed = simulator.clients["client-0"].pack_microbatch("held_out", 0, 0, *batch_of(0)[0])

    with pytest.raises(SealError):
        simulator.enclave.take_frame("client-0", "train", 0, 1, packed.frames[0])


def test_a_host_that_lets_nothing_through_ends_the_session_and_costs_no_step(source):
    simulator, honest = SplitSimulator(make_scene(source)), SplitSimulator(make_scene(source))
    first = train(simulator, 1)
    simulator.host = Meddler("labels.train", flip(-1), always=True)

    with pytest.raises(SealError):
        simulator.step(batch_of(1))

    assert simulator.host.meddled == 3
    simulator.host = lambda crossing: (crossing.frame,)
    simulator.meet_clients()
    assert [*first, *train(simulator, 1, first=1)] == train(honest, 2)
    assert same(simulator.copy_adapters(), honest.copy_adapters())


def test_a_result_that_never_comes_is_an_error_of_its_own(source):
    simulator = SplitSimulator(make_scene(source))
    simulator.host = lambda crossing: () if crossing.name == "result.train" else (crossing.frame,)

    with pytest.raises(FrameError, match="never arrived"):
        simulator.step(batch_of(0))


def test_what_crosses_has_the_same_size_whatever_it_is(source):
    sizes = []
    for seed in (1, 2):
        recorder = Recorder()
        SplitSimulator(make_scene(source), host=recorder).step(batch_of(0, seed=seed))
        sizes.append([(one.name, len(one.frame)) for one in recorder.seen])

    assert sizes[0] == sizes[1]
