"""The owner's parts share one frozen context, and are complete when their constructors return."""

import ast
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import phalanx
from phalanx.pipeline.owner.context import OwnerContext
from phalanx.pipeline.worker.roles import PartyContext
from phalanx.testing import tiny_run

PIPELINE = Path(phalanx.__file__).parent / "pipeline"
ROOMS = [*sorted((PIPELINE / "owner").glob("*.py")), *sorted((PIPELINE / "worker").glob("*.py"))]
MAX_FAILOVER_ATTRIBUTES = 11
"""Half of those that it had when parts of the owner reached for each other through it."""


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def chain_length(node):
    """Count the attributes of a chain that begins at self."""
    length = 0
    while isinstance(node, ast.Attribute):
        node, length = node.value, length + 1
    return length if isinstance(node, ast.Name) and node.id == "self" else 0


def stores(tree):
    """Every attribute that is assigned, deleted or added to."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)]


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_part_reaches_through_two_others(path):
    assert [ast.unparse(node) for node in ast.walk(tree_of(path)) if chain_length(node) >= 4] == []


@pytest.mark.parametrize("name", ["owner/engine.py", "owner/context.py", "owner/roster.py", "worker/process.py"])
def test_no_attribute_of_another_object_is_set(name):
    assert [ast.unparse(node) for node in stores(tree_of(PIPELINE / name)) if chain_length(node) != 1] == []


def test_the_engine_is_complete_when_its_constructor_returns():
    (engine,) = (node for node in tree_of(PIPELINE / "owner/engine.py").body if isinstance(node, ast.ClassDef))
    later = [function for function in engine.body if getattr(function, "name", "") != "__init__"]

    assert [ast.unparse(node) for function in later for node in stores(function)] == []


def test_the_failover_has_half_of_the_attributes_that_it_had():
    tree = tree_of(PIPELINE / "owner/failover.py")
    (failover,) = (node for node in tree.body if isinstance(node, ast.ClassDef))

    assert len({node.attr for node in stores(failover) if chain_length(node) == 1}) <= MAX_FAILOVER_ATTRIBUTES


def test_contexts_are_frozen(make_company):
    company = make_company(tiny_run())
    context = company.engine._context

    assert isinstance(context, OwnerContext)
    for whole in (context, context.party._context):
        for field in fields(whole):
            with pytest.raises(FrozenInstanceError):
                setattr(whole, field.name, None)
    assert isinstance(context.party._context, PartyContext)


def test_time_limits_of_the_run_file_hold_from_the_first_message_on(make_company):
    run = tiny_run()
    limits = {"step_timeout_s": 77.0, "patience_s": 11.0}
    company = make_company(run.model_copy(update={"pipeline": run.pipeline.model_copy(update=limits)}))
    context = company.engine._context

    assert (context.step_timeout_s, context.patience.patience_s, context.requests.timeout_s) == (77.0, 11.0, 11.0)


def test_the_epoch_is_that_of_the_ledger_and_the_first_is_0(make_company):
    company = make_company(tiny_run())

    assert company.engine._facts.ledger.epoch == 0
    company.run(1)
    assert (company.engine._facts.ledger.epoch, company.engine.next_step) == (0, 1)
