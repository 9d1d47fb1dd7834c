"""Packed documents that attend inside themselves are computed as they are alone, through any number of stages."""

import pytest
import torch
from tiny_models import VOCAB, build_all, named, tiny_source

from phalanx.errors import ModelError
from phalanx.models import with_marks
from phalanx.objectives import causal_lm_loss

LENGTHS = ([5, 1, 6], [12], [2, 2, 8])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def packed_rows():
    """Rows of 12 tokens, labels that end with each document, and the documents apart."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (len(LENGTHS), 12), generator=draw)
    labels, documents, alone = ids.roll(-1, 1), torch.zeros_like(ids), []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            end = start + length
            labels[row, end - 1] = -100
            documents[row, start:end] = number
            alone.append((ids[row : row + 1, start:end], labels[row : row + 1, start:end]))
            start = end
    return ids, labels, documents, alone


def chain(stages, x):
    for stage in stages:
        x = stage(x)
    return x


def gradients_of(stages):
    found = {name: value.grad.clone() for name, value in named(stages).items() if value.grad is not None}
    for value in named(stages).values():
        value.grad = None
    return found


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_loss_and_gradients_of_packed_documents_are_those_of_each_alone(cache, name, kernel):
    stages = build_all(tiny_source(name, cache), 3, attention=kernel)
    ids, labels, documents, alone = packed_rows()
    whole = torch.zeros(())
    for one, targets in alone:
        whole = whole + causal_lm_loss(chain(stages, one), targets)[0]
    whole.backward()
    expected = gradients_of(stages)

    for stage in stages:
        stage.attends = "documents"
    loss, _ = causal_lm_loss(chain(stages, with_marks(ids, {"documents": documents})), labels)
    loss.backward()

    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    found = gradients_of(stages)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=2e-4, atol=2e-6, msg=key)
    for stage in stages:
        stage.attends = "causal"
    across, _ = causal_lm_loss(chain(stages, ids), labels)
    assert abs(float(across.detach() - whole.detach())) > 1e-3


def test_a_message_carries_the_borders_and_no_gradient_goes_back_through_them(cache):
    stages = build_all(tiny_source("gpt2", cache), 3)
    for stage in stages:
        stage.attends = "documents"
    ids, _, documents, _ = packed_rows()

    sent = stages[0](with_marks(ids, {"documents": documents})).detach().requires_grad_()
    stages[1](sent).square().sum().backward()

    borders = torch.zeros(ids.shape, dtype=torch.bool)
    borders[:, 0] = True
    borders[:, 1:] = documents[:, 1:] != documents[:, :-1]
    assert sent.shape == (*ids.shape, 33)
    assert torch.equal(sent[..., -1], borders.float())
    assert (sent.grad[..., -1] == 0).all()
    assert (sent.grad[..., :-1] != 0).any()


def test_a_row_without_borders_is_one_document(cache):
    stages = build_all(tiny_source("llama", cache), 2)
    ids = packed_rows()[0]
    plain = chain(stages, ids)
    for stage in stages:
        stage.attends = "documents"

    torch.testing.assert_close(chain(stages, ids), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("junk", [float("nan"), 0.4, -1.0])
def test_what_is_no_border_is_read_as_none(cache, junk):
    stages = build_all(tiny_source("gpt2", cache), 2)
    for stage in stages:
        stage.attends = "documents"
    ids, _, documents, _ = packed_rows()
    sent = stages[0](with_marks(ids, {"documents": documents})).detach()
    none, odd = sent.clone(), sent.clone()
    none[..., 1:, -1] = 0.0
    odd[..., 1:, -1] = junk

    assert torch.equal(stages[1](odd), stages[1](none))


def test_a_family_without_such_attention_is_refused_by_name(cache):
    stage = build_all(tiny_source("bloom", cache), 2)[0]
    stage.attends = "documents"

    with pytest.raises(ModelError, match="bloom: has no documents attention"):
        stage(packed_rows()[0])
