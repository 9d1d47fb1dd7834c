import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pad_worlds import MASTER, RUN, aes_pads, new_ledger
from phalanx.errors import FixedPointError, FrameError, PadError, WrongProductError
from phalanx.security.mask import (
    AesPads,
    MaskedWorker,
    OsPads,
    P,
    ProductCheck,
    ProductMessage,
    masked_linear,
    worst_error,
)

ROWS, INNER, COLUMNS = 16, 96, 48
RNG = np.random.default_rng(11)
WEIGHT = RNG.standard_normal((INNER, COLUMNS)).astype(np.float32)
X = RNG.standard_normal((ROWS, INNER)).astype(np.float32)
GRADIENT = (1e-6 * RNG.standard_normal((ROWS, COLUMNS))).astype(np.float32)


@pytest.fixture
def layer():
    ledger = new_ledger()
    return masked_linear("layer 0", WEIGHT, ROWS, lambda p: AesPads(ledger, MASTER, (RUN, p.layer, p.direction)))


@pytest.fixture
def worker(layer):
    return worker_of(layer)


def worker_of(layer):
    worker = MaskedWorker()
    for side in (layer.forward, layer.backward):
        worker.load_matrix(side.product, side.weight.values)
    return worker


def through(side, worker, x):
    side.pool.make_pad()
    sent = side.mask_rows(x)
    return side.unmask_answer(sent, worker.answer_request(sent.request))


def allowed(x, w):
    """Largest error, from the lengths of rows and columns; float32 rounds once more."""
    lengths = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(w.astype(np.float64), axis=0)
    return (worst_error(len(w)) + 2.0**-23) * lengths


def test_forward_and_backward_are_those_of_a_plain_layer_up_to_the_stated_error(layer, worker):
    y = through(layer.forward, worker, X)
    dx = through(layer.backward, worker, GRADIENT)

    assert y.dtype == dx.dtype == np.float32
    assert (np.abs(y - X.astype(np.float64) @ WEIGHT) <= allowed(X, WEIGHT)).all()
    assert (np.abs(dx - GRADIENT.astype(np.float64) @ WEIGHT.T) <= allowed(GRADIENT, WEIGHT.T)).all()
    assert np.linalg.norm(y - X @ WEIGHT) <= 3e-4 * np.linalg.norm(y)
    assert np.linalg.norm(dx - GRADIENT @ WEIGHT.T) <= 3e-4 * np.linalg.norm(dx)


def test_a_classifier_of_two_masked_layers_decides_as_the_plain_one_but_for_three_in_a_thousand():
    rng, rows = np.random.default_rng(2), 2000
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((128, 256), (256, 10))]
    plain = masked = rng.standard_normal((rows, 128)).astype(np.float32)

    for index, weight in enumerate(weights):
        layer = masked_linear(f"layer {index}", weight, rows, lambda product: OsPads())
        plain, masked = np.tanh(plain @ weight / 16), np.tanh(through(layer.forward, worker_of(layer), masked) / 16)

    assert (plain.argmax(axis=1) != masked.argmax(axis=1)).mean() <= 0.003


@pytest.mark.parametrize("rows", [1, 5, ROWS])
def test_fewer_rows_than_a_pad_has_give_the_same_numbers(layer, worker, rows):
    assert (through(layer.forward, worker, X[:rows]) == through(layer.forward, worker, X)[:rows]).all()


def test_two_pads_give_the_same_result_bit_for_bit(layer, worker):
    assert (through(layer.forward, worker, X) == through(layer.forward, worker, X)).all()


def test_pads_of_the_operating_system_do_as_well(worker, layer):
    strict = masked_linear("layer 0", WEIGHT, ROWS, lambda product: OsPads())

    assert (through(strict.forward, worker, X) == through(layer.forward, worker, X)).all()


def test_a_second_worker_that_sees_pads_alone_replaces_the_work_here(layer, worker):
    second = worker_of(layer)
    pool = layer.forward.pool
    request = pool.request_pad()

    pool.accept_product(second.answer_request(request), layer.forward.check)
    sent = layer.forward.mask_rows(X)
    y = layer.forward.unmask_answer(sent, worker.answer_request(sent.request))

    assert (y == through(layer.forward, worker, X)).all()
    assert not (sent.request.values == request.values).all()


def test_a_second_worker_that_lies_is_found_and_its_pad_never_used(layer):
    pool, second = layer.forward.pool, worker_of(layer)
    answer = second.answer_request(pool.request_pad())
    answer.values[2, 3] = (int(answer.values[2, 3]) + 1) % P

    with pytest.raises(WrongProductError, match=r"^layer 0, forward, pad \d+: is not the product"):
        pool.accept_product(answer, layer.forward.check)
    assert len(pool) == 0
    with pytest.raises(FrameError, match="was not asked for"):
        pool.accept_product(answer, layer.forward.check)


def test_nothing_is_sent_without_a_pad(layer):
    layer.forward.pool.make_pad()
    layer.forward.mask_rows(X)

    with pytest.raises(PadError, match=r"^layer 0, forward: no pad is ready"):
        layer.forward.mask_rows(X)


def test_more_rows_than_a_pad_has_are_refused(layer):
    layer.forward.pool.make_pad()

    with pytest.raises(PadError, match="17 rows are to be masked, pads have 16"):
        layer.forward.mask_rows(np.ones((17, INNER), np.float32))
    assert len(layer.forward.pool) == 1


def test_a_number_that_is_not_finite_is_not_sent_and_costs_no_pad(layer):
    layer.forward.pool.make_pad()
    bad = X.copy()
    bad[3, 4] = np.nan

    with pytest.raises(FixedPointError, match=r"^layer 0, forward: row 3 holds NaN or infinity"):
        layer.forward.mask_rows(bad)
    assert len(layer.forward.pool) == 1


def test_an_activation_beyond_the_bound_of_its_layer_stops_the_step():
    longest = float(np.linalg.norm(X, axis=1).max())
    layer = masked_linear("layer 0", WEIGHT, ROWS, lambda product: OsPads(), bound=1.01 * longest)
    y = through(layer.forward, worker_of(layer), X)

    assert np.linalg.norm(y - X @ WEIGHT) <= 1e-3 * np.linalg.norm(y)
    layer.forward.pool.make_pad()
    with pytest.raises(FixedPointError, match="overflow: row"):
        layer.forward.mask_rows(1.1 * X)


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda a: replace(a, number=a.number + 1), "it is late, or the worker mixes requests up"),
        (lambda a: replace(a, product=ProductMessage("layer 0", "backward")), "of layer 0, backward"),
        (lambda a: replace(a, values=a.values[1:]), "expected uint32 [16, 48]"),
        (lambda a: replace(a, values=a.values.astype(np.int64)), "got int64"),
        (lambda a: replace(a, values=a.values.astype(np.float32)), "got float32"),
        (lambda a: replace(a, values=np.full_like(a.values, P)), "2147483647 or more"),
        (lambda a: replace(a, values=a.values.tolist()), "got list"),
    ],
)
def test_an_answer_of_another_form_is_refused_and_the_honest_one_taken_afterwards(layer, worker, alter, said):
    layer.forward.pool.make_pad()
    sent = layer.forward.mask_rows(X)
    answer = worker.answer_request(sent.request)

    with pytest.raises(FrameError) as caught:
        layer.forward.unmask_answer(sent, alter(answer))

    assert said in str(caught.value)
    assert layer.forward.unmask_answer(sent, answer).shape == (ROWS, COLUMNS)


def test_a_worker_refuses_what_it_has_not_loaded_and_what_does_not_fit(layer, worker):
    layer.forward.pool.make_pad()
    request = layer.forward.mask_rows(X).request

    with pytest.raises(FrameError, match=r"^layer 9, forward: is not loaded here"):
        worker.answer_request(replace(request, product=ProductMessage("layer 9", "forward")))
    with pytest.raises(FrameError, match="expected uint32"):
        worker.answer_request(replace(request, product=ProductMessage("layer 0", "backward")))
    with pytest.raises(FrameError, match="2147483647 or more"):
        worker.answer_request(replace(request, values=np.full_like(request.values, P)))


def test_after_a_lie_a_new_check_goes_on(layer, worker):
    layer.forward.pool.make_pad()
    sent = layer.forward.mask_rows(X)
    answer = worker.answer_request(sent.request)
    lie = replace(answer, values=(answer.values + np.uint32(1)) % np.uint32(P))
    with pytest.raises(WrongProductError):
        layer.forward.unmask_answer(sent, lie)
    with pytest.raises(WrongProductError, match="has refused before"):
        layer.forward.unmask_answer(sent, answer)

    renewed = replace(layer.forward, check=ProductCheck(layer.forward.weight.values, aes_pads(new_ledger())))

    assert renewed.unmask_answer(sent, answer).shape == (ROWS, COLUMNS)


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(FixedPointError, match=r"^layer 0, forward: column 1 holds NaN or infinity"):
        masked_linear("layer 0", np.array([[0, np.nan]], np.float32), 1, lambda product: OsPads())


def test_neither_pads_nor_activations_are_shown(layer):
    layer.forward.pool.make_pad()
    sent = layer.forward.mask_rows(X)

    shown = repr([layer, sent, layer.forward.pool.request_pad(), new_ledger()])

    assert "array" not in shown
    assert "ready=0" in shown


def test_the_trusted_side_loads_no_torch():
    program = "import sys, phalanx.security.mask; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
