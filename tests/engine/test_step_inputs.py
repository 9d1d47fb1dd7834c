"""What every engine gets for a step, and what a record says of a step without a guard."""

import pytest
import torch

from phalanx.data import Batch
from phalanx.engine import UNGUARDED, StepInputs
from phalanx.errors import DataError
from phalanx.security.crypto import digest_hex
from phalanx.train import step_inputs


def inputs(ids, labels):
    return StepInputs(ids=tuple(ids.split(2)), labels=tuple(labels.split(2)), num_targets=labels.numel())


def test_the_digest_of_a_batch_is_that_of_its_bytes_in_the_order_of_the_microbatches():
    ids, labels = torch.arange(12).reshape(4, 3), torch.arange(12, 24).reshape(4, 3)

    digest = inputs(ids, labels).batch_digest()

    # old logs hold this digest: it must stay what it is
    assert digest == digest_hex(ids.numpy().tobytes(), labels.numpy().tobytes())[:32]


def test_another_token_another_label_and_another_order_have_another_digest():
    ids, labels = torch.arange(12).reshape(4, 3), torch.arange(12, 24).reshape(4, 3)
    changed = labels.clone()
    changed[3, 2] += 1

    digests = {
        inputs(ids, labels).batch_digest(),
        inputs(ids, changed).batch_digest(),
        inputs(ids.flip(0), labels).batch_digest(),
    }

    assert len(digests) == 3


def test_a_step_without_a_guard_ran_once_and_nothing_was_audited():
    assert (UNGUARDED.attempts, UNGUARDED.num_audits, UNGUARDED.num_alarms, UNGUARDED.verdicts) == (1, 0, 0, ())


def with_extras(**extras):
    ids = torch.arange(12).reshape(4, 3)
    batch = Batch(ids, ids + 1, (0, 1, 2, 3), extras)
    return step_inputs(batch, 2)


def test_extra_rows_are_cut_as_the_tokens_are():
    weights = torch.arange(4.0)

    inputs = with_extras(weights=weights, mask=torch.ones(4, 3))

    assert [inputs.extras_of(number)["weights"].tolist() for number in range(2)] == [[0.0, 1.0], [2.0, 3.0]]
    assert inputs.extras_of(1)["mask"].shape == (2, 3)
    assert with_extras().extras_of(1) == {}


def test_no_extra_rows_leave_the_digest_that_old_logs_have():
    ids = torch.arange(12).reshape(4, 3)

    plain = StepInputs(tuple(ids.split(2)), tuple((ids + 1).split(2)), 12)

    assert (
        with_extras().batch_digest()
        == plain.batch_digest()
        == digest_hex(ids.numpy().tobytes(), (ids + 1).numpy().tobytes())[:32]
    )


def test_the_digest_covers_name_type_shape_and_every_number_of_extra_rows():
    rows = torch.arange(4.0)
    changed = rows.clone()
    changed[3] += 1
    variants = [
        with_extras(),
        with_extras(a=rows),
        with_extras(a=changed),
        with_extras(b=rows),
        with_extras(a=rows.to(torch.float64)),
        with_extras(a=rows.view(torch.int32)),
        with_extras(a=rows.unsqueeze(1)),
        with_extras(a=rows, b=rows),
    ]

    assert len({inputs.batch_digest() for inputs in variants}) == len(variants)
    assert with_extras(a=rows, b=changed).batch_digest() == with_extras(b=changed, a=rows).batch_digest()


def test_extra_rows_that_do_not_fit_are_refused_by_name():
    ids = (torch.ones(2, 3, dtype=torch.int64),) * 2
    fitting = {"weights": torch.ones(2)}

    with pytest.raises(DataError, match=r"extras\.mask: has shape \[3, 3\], the batch 4 sequences"):
        with_extras(mask=torch.ones(3, 3))
    with pytest.raises(DataError, match=r"extras\.mask: has shape \[\]"):
        with_extras(mask=torch.tensor(1.0))
    with pytest.raises(DataError, match=r"extras\.weights: microbatch 1 has shape \[3\] and 2 rows"):
        StepInputs(ids, ids, 12, (fitting, {"weights": torch.ones(3)}))
    with pytest.raises(DataError, match=r"microbatch 1 has \[\], the first one \['weights'\]"):
        StepInputs(ids, ids, 12, (fitting, {}))
    with pytest.raises(DataError, match="are of 1 microbatches, the step has 2"):
        StepInputs(ids, ids, 12, (fitting,))
