"""Each kind of attention gives the bits of transformers' whole model; kinds that it has not are refused."""

import pytest
import torch
from tiny_models import VOCAB, build_all, named, some_ids, tiny_source, whole_model

from phalanx.errors import ModelError
from phalanx.models import AttentionPattern

FAMILIES = ("gpt2", "opt", "llama")
KERNELS = ("sdpa", "eager")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def chain(stages, ids, pattern):
    x = ids
    for stage in stages:
        x = stage(x, pattern)
    return x


def as_transformers_takes_it(seen, kernel):
    """A mask ``[batch, 1, seq, seq]``, in the words of the kernel."""
    if kernel == "sdpa":
        return seen
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def seen_with(ids, lengths=None):
    batch, seq = ids.shape
    seen = torch.ones(batch, 1, seq, seq, dtype=torch.bool)
    if lengths is None:
        return seen
    seen = seen.tril()
    for row, length in enumerate(lengths):
        seen[row, :, :, :length] = True
    return seen


def assert_same(cache, name, kernel, pattern, **whole):
    source = tiny_source(name, cache)
    model, stages, ids = whole_model(source, kernel), build_all(source, 3, attention=kernel), some_ids()

    expected = model(input_ids=ids, labels=ids, use_cache=False, **whole)
    expected.loss.backward()
    logits = chain(stages, ids, pattern)
    model.loss_function(logits, ids, vocab_size=VOCAB).backward()

    assert torch.equal(logits, expected.logits)
    gradients = {key: value.grad for key, value in named(stages).items() if value.grad is not None}
    for key, value in model.named_parameters():
        assert value.grad is None or torch.equal(gradients[key], value.grad), key
    assert not torch.equal(logits, chain(stages, ids, AttentionPattern()))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_sees_every_other_in_both_directions(cache, name, kernel):
    ids = some_ids()
    mask = as_transformers_takes_it(seen_with(ids), kernel)

    places = torch.arange(ids.shape[1]).expand(ids.shape)
    assert_same(cache, name, kernel, AttentionPattern("bidirectional"), attention_mask=mask, position_ids=places)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_sees_the_prefix_of_its_row(cache, name, kernel):
    ids = some_ids()
    lengths = torch.arange(ids.shape[0]) + 2
    mask = as_transformers_takes_it(seen_with(ids, lengths.tolist()), kernel)

    places = torch.arange(ids.shape[1]).expand(ids.shape)
    pattern = AttentionPattern("prefix", prefix=lengths)
    assert_same(cache, name, kernel, pattern, attention_mask=mask, position_ids=places)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_document_sees_itself_alone_and_its_positions_begin_anew(cache, name, kernel):
    ids = some_ids()
    documents = torch.zeros(ids.shape, dtype=torch.int64)
    documents[:, 3:] = 1
    documents[0, 7:] = 2
    pattern = AttentionPattern("documents", documents=documents)

    places = pattern.token_positions(ids.shape[1], ids.device)
    assert places[0, :8].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert_same(cache, name, kernel, pattern, position_ids=places)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nothing_of_another_document_reaches_a_token(cache, name):
    stages, ids = build_all(tiny_source(name, cache), 2), some_ids()
    documents = torch.zeros(ids.shape, dtype=torch.int64)
    documents[:, 5:] = 1
    changed = ids.clone()
    changed[:, :5] = (changed[:, :5] + 1) % VOCAB

    pattern = AttentionPattern("documents", documents=documents)
    found, other = chain(stages, ids, pattern), chain(stages, changed, pattern)

    assert torch.equal(found[:, 5:], other[:, 5:])
    assert not torch.equal(found[:, :5], other[:, :5])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bloom", "bidirectional"), ("bloom", "prefix"), ("bloom", "documents"), ("opt", "documents")],
)
def test_a_family_without_a_kind_refuses_it_by_name(cache, name, kind):
    stages, ids = build_all(tiny_source(name, cache), 1), some_ids()
    needs = {"prefix": torch.ones(len(ids), dtype=torch.int64), "documents": torch.zeros_like(ids)}
    pattern = AttentionPattern(kind, **{name: rows for name, rows in needs.items() if name == kind})

    with pytest.raises(ModelError, match=f"{name}: has no {kind} attention in transformers, only .*causal"):
        chain(stages, ids, pattern)


def test_what_a_kind_needs_is_there_and_fits(cache):
    stages, ids = build_all(tiny_source("gpt2", cache), 1), some_ids()
    seq = ids.shape[1]

    with pytest.raises(ModelError, match=r"attention prefix: was given nothing, needs \['prefix'\]"):
        AttentionPattern("prefix")
    with pytest.raises(ModelError, match=r"attention causal: was given \['documents'\], needs nothing"):
        AttentionPattern(documents=torch.zeros_like(ids))
    with pytest.raises(ModelError, match=f"expected 0 to {seq}"):
        chain(stages, ids, AttentionPattern("prefix", prefix=torch.full((len(ids),), seq + 1)))
    with pytest.raises(ModelError, match=r"attention documents: torch.int64 .*; expected int64"):
        chain(stages, ids, AttentionPattern("documents", documents=torch.zeros_like(ids)[:, :-1]))
