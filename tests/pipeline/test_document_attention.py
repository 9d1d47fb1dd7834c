"""A guarded pipeline attends inside documents: it learns what whole documents teach, and a moved border is named."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from phalanx.data import DOCUMENTS, Batch
from phalanx.errors import ConfigError
from phalanx.pipeline import GuardConfig
from phalanx.testing import Actor, random_batch, tampering, tiny_run
from phalanx.train import step_inputs


def document_run(**changes):
    run = tiny_run(**changes)
    return run.model_copy(update={"data": run.data.model_copy(update={"attention": "document"})})


def whole_gradient(source, batch: Batch):
    """Mean loss and gradient norm of the un-sliced model, each document alone."""
    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32, local_files_only=True).train()
    total = torch.zeros(())
    for ids, labels, documents in zip(batch.input_ids, batch.labels, batch.extras[DOCUMENTS], strict=True):
        for number in documents.unique():
            own = documents == number
            logits = model(ids[own].unsqueeze(0)).logits
            total = total + torch.nn.functional.cross_entropy(logits[0], labels[own], reduction="sum")
    loss = total / int((batch.labels != -100).sum())
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    return float(loss.detach()), float(norm)


def test_a_guarded_step_on_packed_documents_is_that_of_the_documents_alone(make_company):
    run = document_run(guard=GuardConfig(audit_rate=1.0, step_audit_rate=1.0, owner_audit_rate=1.0))
    company = make_company(run)
    batch = random_batch(run, company.source.vocab_size, 0)
    assert int(batch.extras[DOCUMENTS].max()) > 2

    result = company.engine.train_turn(0, step_inputs(batch, run.train.microbatches))

    loss, norm = whole_gradient(company.source, batch)
    assert result.loss == pytest.approx(loss, rel=2e-6)
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert company.verdicts == []
    assert result.guard.num_audits > 0


def test_a_worker_that_moves_a_border_is_named_and_no_bit_is_lost(make_company, honest_digest):
    def move(direction, step, microbatch, tensor):
        moved = tensor.clone()
        if direction == "forward" and step == 1:
            moved[..., -1] = moved[..., -1].roll(1, dims=1)
        return moved

    run = document_run()
    company = make_company(run, {1: Actor(wrap_copy=tampering(move))})

    company.run(3)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.direction) == ("worker-1", "message", "forward")
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_family_without_such_attention_is_refused_before_the_first_step(make_company):
    run = document_run()
    bloom = {"model_type": "bloom", "n_layer": 4, "hidden_size": 16, "n_head": 2, "vocab_size": 64}
    model = run.model.model_copy(update={"architecture": bloom})

    with pytest.raises(ConfigError, match="transformers does not support it for bloom"):
        make_company(run.model_copy(update={"model": model}))
