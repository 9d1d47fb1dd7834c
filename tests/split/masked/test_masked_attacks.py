"""What workers try, and what it takes to stop them: each attack wins where its guard is off."""

import numpy as np
import pytest
import torch
from masked_worlds import VOCAB, Liar, Spy, a_desk, a_model, chi_square, some_ids
from torch import nn

from pad_worlds import MASTER, RUN, new_ledger
from phalanx.errors import WrongProductError
from phalanx.security.mask import P, ProductMessage, offload
from phalanx.security.mask.fixed_point import LARGEST, decode_product, encode_rows
from phalanx.security.mask.freivalds import UnsafeNoChecker
from phalanx.security.mask.ring import centred_residues
from phalanx.split.masked import MaskedLinear, mask_linears
from phalanx.split.masked.pad_sources import ledger_pads, system_pads
from seeded_entropy import bytes_from

FIRST = "transformer.h.0.attn.c_attn"
WANTED = 7


class PlainDesk:
    """Offload without masks, as any accelerator is used; exists for spies to show what they would see."""

    def __init__(self):
        self.weights, self.seen = {}, []

    def add_layer(self, layer, weight):
        self.weights[ProductMessage(layer, "forward")] = weight
        self.weights[ProductMessage(layer, "backward")] = weight.T

    def multiply_rows(self, product, x):
        self.seen.append((product, x.copy()))
        return x @ self.weights[product]


def seeded_pads():
    """Pads that are the same in each run of a test of statistics."""
    return ledger_pads(new_ledger(fresh=bytes_from(1)), MASTER, RUN)


def guesses(stage, seen):
    """Tokens with first activations, which follow from public weights, nearest to what a worker saw."""
    ids = torch.arange(VOCAB).unsqueeze(1).expand(-1, seen.shape[1])
    trunk = stage.trunk
    with torch.no_grad():
        known = trunk.h[0].ln_1(trunk.wte(ids) + trunk.wpe(torch.arange(seen.shape[1])))
    # by angle, since what is masked has no scale
    known, seen = (nn.functional.normalize(one, dim=-1) for one in (known, seen))
    return torch.einsum("vsd,bsd->bsv", known, seen).argmax(-1)


def test_a_spy_reads_every_token_of_a_plain_offload_and_no_more_than_chance_of_a_masked_one(cache):
    ids = some_ids(batch=64)
    plain, masked = a_model(cache), a_model(cache)
    open_masking_client, spy = PlainDesk(), Spy()
    mask_linears(plain, open_masking_client)
    mask_linears(masked, a_desk(spy, seeded_pads(), rows=1024))

    with torch.no_grad():
        plain(ids)
        masked(ids)

    (bare,) = [x for product, x in open_masking_client.seen if product == ProductMessage(FIRST, "forward")]
    (hidden,) = spy.requests(FIRST)
    shape = (*ids.shape, -1)
    reads = [
        float((guesses(plain, seen.reshape(shape)) == ids).float().mean())
        for seen in (torch.from_numpy(bare), torch.from_numpy(centred_residues(hidden.values)).float())
    ]
    assert reads[0] == 1.0
    # 768 guesses at chance 1 / 61, and four standard deviations
    assert reads[1] <= 1 / VOCAB + 4 * (1 / VOCAB / ids.numel()) ** 0.5


def test_what_a_worker_sees_of_a_training_step_is_uniform_and_what_is_behind_it_is_not(cache):
    stage, spy, ids = a_model(cache), Spy(), some_ids(batch=16)
    mask_linears(stage, a_desk(spy, seeded_pads(), rows=256))

    nn.functional.cross_entropy(stage(ids).flatten(0, 1), ids.flatten()).backward()

    seen = {way: [x for x in spy.seen if x.product.direction == way] for way in ("forward", "backward")}
    for requests in seen.values():
        assert abs(chi_square(np.concatenate([one.values.ravel() for one in requests]), P)) <= 5
    everything = np.concatenate([one.values.ravel() for one in spy.seen])
    # neighbours do not know of each other either
    assert abs(np.corrcoef(everything[:-1], everything[1:])[0, 1]) <= 5 / everything.size**0.5
    plain, open_masking_client = a_model(cache), PlainDesk()
    mask_linears(plain, open_masking_client)
    plain(ids)
    assert chi_square(np.concatenate([encode_rows(x).values.ravel() for _, x in open_masking_client.seen]), P) > 100


def towards(token):
    """A lie that raises one token's score and lowers all others, as far as results stay in the range of products."""

    def bend(product, values):
        if product == ProductMessage("lm_head", "forward"):
            shift = np.full(values.shape[1], -LARGEST * 35 // 100)
            shift[token] *= -1
            values[:] = (values.astype(np.int64) + shift) % P
        return values

    return bend


def test_a_worker_that_chooses_what_the_model_says_is_caught(cache):
    stage = a_model(cache)
    mask_linears(stage, a_desk(Liar(towards(WANTED), name="mallory")))

    with pytest.raises(WrongProductError, match=r"^mallory: lm_head, forward, pad \d+: is not the product"):
        stage(some_ids())


def test_without_the_check_a_worker_chooses_what_the_model_says(cache, monkeypatch):
    monkeypatch.setattr(offload, "ProductCheck", lambda weight, secrets: UnsafeNoChecker())
    shares = []
    for worker in (Spy(), Liar(towards(WANTED))):
        stage = a_model(cache)
        mask_linears(stage, a_desk(worker))
        with torch.no_grad():
            shares.append(float((stage(some_ids()).argmax(-1) == WANTED).float().mean()))

    assert shares[0] < 0.1
    assert shares[1] > 0.5


def test_a_lie_in_the_backward_pass_stops_before_any_gradient_is_used(cache):
    def bend(product, values):
        if product.direction == "backward":
            values[-1, -1] = (int(values[-1, -1]) + P - 1) % P
        return values

    stage, ids = a_model(cache), some_ids()
    mask_linears(stage, a_desk(Liar(bend)))
    loss = nn.functional.cross_entropy(stage(ids).flatten(0, 1), ids.flatten())

    with pytest.raises(WrongProductError, match=r"^liar: lm_head, backward"):
        loss.backward()
    assert all(value.grad is None for value in stage.trainable_parameters().values())


def count_caught(times):
    """How many of so many changes of one element each are caught, in both directions."""
    rng = np.random.default_rng(5)

    def bend(product, values):
        place = rng.integers(values.shape[0]), rng.integers(values.shape[1])
        delta = (1, P - 1, int(rng.integers(1, P)))[rng.integers(3)]
        values[place] = (int(values[place]) + delta) % P
        return values

    client = a_desk(Liar(bend), pads=system_pads(), rows=4)
    layer = nn.Linear(12, 6).requires_grad_(False)
    MaskedLinear(layer, "layer", client)
    inputs = {way: rng.standard_normal((4, size), dtype=np.float32) for way, size in (("forward", 12), ("backward", 6))}
    caught = 0
    for index in range(times):
        product = ProductMessage("layer", ("forward", "backward")[index % 2])
        try:
            client.multiply_rows(product, inputs[product.direction])
        except WrongProductError:
            caught += 1
        client.renew_check(product)
    return caught


def test_each_of_a_thousand_single_tampers_is_caught_at_the_desk():
    assert count_caught(1000) == 1000


@pytest.mark.slow
def test_each_of_a_hundred_thousand_single_tampers_is_caught_at_the_desk():
    assert count_caught(10**5) == 10**5


def count_wrong(rounds, rows=512, inner=64, columns=128):
    """(wrong, all) of a module's ring products, by 64-bit integers, and of the results that come of them."""
    spy, rng = Spy(), np.random.default_rng(3)
    client = a_desk(spy, rows=rows)
    torch.manual_seed(4)
    layer = nn.Linear(inner, columns, bias=False).requires_grad_(False)
    masked = MaskedLinear(layer, "layer", client)
    wrong = total = 0
    for _ in range(rounds):
        x = torch.from_numpy(rng.standard_normal((rows, inner), dtype=np.float32)).requires_grad_()
        gradient = torch.from_numpy(rng.standard_normal((rows, columns), dtype=np.float32))
        y = masked(x)
        y.backward(gradient)
        results = {"forward": (x.detach(), y.detach()), "backward": (gradient, x.grad)}
        for request, answer in zip(spy.seen, spy.answered, strict=True):
            weight = spy.loaded[request.product].astype(np.int64)
            exact = (centred_residues(request.values).astype(np.int64) @ weight) % P
            wrong += int((exact != answer.values).sum())
            total += exact.size
            found = results[request.product.direction]
            wrong += int((unmasked(found[0].numpy(), weight, client, request.product) != found[1].numpy()).sum())
        spy.seen.clear()
        spy.answered.clear()
    return wrong, total


def unmasked(x, weight, client, product):
    """What exact integers without any mask give."""
    side = client._masked_product(product)
    rows = encode_rows(x)
    exact = (centred_residues(rows.values).astype(np.int64) @ weight) % P
    return decode_product(exact.astype(np.uint32), rows.scales, side.weight.scales)


def test_no_ring_product_of_a_hundred_thousand_is_wrong_through_the_module():
    wrong, total = count_wrong(rounds=2)

    assert total > 10**5
    assert wrong == 0


@pytest.mark.slow
def test_no_ring_product_of_ten_million_is_wrong_through_the_module():
    wrong, total = count_wrong(rounds=110)

    assert total > 10**7
    assert wrong == 0


def test_a_wrong_product_would_be_counted(monkeypatch):
    multiply = offload.MaskedWorker.answer_request

    def off_by_one(self, request):
        answer = multiply(self, request)
        answer.values[0, 0] = (int(answer.values[0, 0]) + 1) % P
        return answer

    monkeypatch.setattr(offload.MaskedWorker, "answer_request", off_by_one)
    monkeypatch.setattr(offload, "ProductCheck", lambda weight, secrets: UnsafeNoChecker())

    assert count_wrong(rounds=1, rows=8)[0] >= 2
