"""What every engine gets for a step, and what a record says of a step without a guard."""

import torch

from phalanx.engine import UNGUARDED, StepInputs
from phalanx.security.crypto import digest_hex


def inputs(ids, labels):
    return StepInputs(ids=tuple(ids.split(2)), labels=tuple(labels.split(2)), num_targets=labels.numel())


def test_the_digest_of_a_batch_is_that_of_its_bytes_in_the_order_of_the_microbatches():
    ids, labels = torch.arange(12).reshape(4, 3), torch.arange(12, 24).reshape(4, 3)

    digest = inputs(ids, labels).digest()

    # old logs hold this digest: it must stay what it is
    assert digest == digest_hex(ids.numpy().tobytes(), labels.numpy().tobytes())[:32]


def test_another_token_another_label_and_another_order_have_another_digest():
    ids, labels = torch.arange(12).reshape(4, 3), torch.arange(12, 24).reshape(4, 3)
    changed = labels.clone()
    changed[3, 2] += 1

    digests = {inputs(ids, labels).digest(), inputs(ids, changed).digest(), inputs(ids.flip(0), labels).digest()}

    assert len(digests) == 3


def test_a_step_without_a_guard_ran_once_and_nothing_was_audited():
    assert (UNGUARDED.attempts, UNGUARDED.num_audits, UNGUARDED.num_alarms, UNGUARDED.verdicts) == (1, 0, 0, ())
