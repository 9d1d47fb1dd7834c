"""Texts cross as bytes and come back the same; what cannot be an honest answer is seen without weights."""

from dataclasses import replace

import numpy as np
import pytest
from rollout_scene import END, VOCAB_SIZE

from phalanx.errors import DataError, FrameError, ModelError
from phalanx.rollouts import PolicyModel, Prompt, RolloutPolicy, generate_rollouts, pack_answer, reread_rollouts
from phalanx.rollouts.rollout import describe_misfit, unpack_answer

# of this model in float32 on any path: measured below 1e-5
TOLERANCE = 1e-3


def test_an_honest_answer_fits_and_comes_back_bit_for_bit(honest, request_of_step):
    answer, payload = pack_answer(request_of_step, honest)

    read = unpack_answer(request_of_step, answer, payload)

    assert [describe_misfit(request_of_step, one, VOCAB_SIZE) for one in read] == [None] * 12
    for one, other in zip(read, honest, strict=True):
        assert (one.ids, one.finish, one.prompt_ids) == (other.ids, other.finish, other.prompt_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
        assert np.array_equal(one.sketches, other.sketches)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_honest_text_is_found_again_by_one_pass(attention, policy, honest, request_of_step):
    found = reread_rollouts(PolicyModel.from_policy(policy, attention), request_of_step, honest, TOLERANCE)

    assert max(one.margins.max() for one in found) < 1e-4
    assert max(one.logprob_gaps.max() for one in found) < 1e-4
    assert max(one.sketch_gaps.max() for one in found) < 1e-4


def test_equal_requests_give_equal_bits(model, honest, request_of_step):
    again = generate_rollouts(model, request_of_step)

    assert pack_answer(request_of_step, again) == pack_answer(request_of_step, honest)


def test_a_payload_of_another_size_is_refused(honest, request_of_step):
    answer, payload = pack_answer(request_of_step, honest)

    with pytest.raises(FrameError, match=r"the payload has \d+ bytes, its lines need \d+"):
        unpack_answer(request_of_step, answer, payload[:-4])


def test_a_prompt_that_was_not_asked_for_is_refused(honest, request_of_step):
    answer, payload = pack_answer(request_of_step, honest)
    line = answer.lines[0].model_copy(update={"prompt": 99})

    with pytest.raises(FrameError, match="prompt 99 was not asked for"):
        unpack_answer(request_of_step, answer.model_copy(update={"lines": (line, *answer.lines[1:])}), payload)


def cut(text, count, finish):
    return replace(text, ids=text.ids[:count], logprobs=text.logprobs[:count], finish=finish)


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        (lambda text: cut(text, 3, "length"), "says length after 3 of 24 tokens"),
        (lambda text: cut(text, 3, "stop"), "says stop, and its last token ends no text"),
        (lambda text: replace(text, ids=(END, *text.ids[1:])), "goes on after a token that ends a text"),
        (lambda text: replace(text, ids=(VOCAB_SIZE, *text.ids[1:])), "has a token beyond the vocabulary of 256"),
        (lambda text: replace(text, ids=text.ids * 2), "has 48 tokens, expected 1 to 24"),
        (lambda text: replace(text, logprobs=text.logprobs * np.nan), "has a number that is not finite"),
        (lambda text: replace(text, reward=np.inf), "has a number that is not finite"),
    ],
)
def test_what_no_honest_worker_sends_is_seen_without_weights(lie, found, honest, request_of_step):
    text = next(one for one in honest if one.finish == "length")

    assert found in describe_misfit(request_of_step, lie(text), VOCAB_SIZE)


def test_a_prompt_that_leaves_no_room_is_refused(model, request_of_step):
    long = request_of_step.model_copy(update={"prompts": (Prompt(number=3, ids=(9,) * 80),)})

    with pytest.raises(DataError, match="prompt 3: has 80 tokens, with 24 new ones more than the model's window of 96"):
        generate_rollouts(model, long)


def test_weights_that_do_not_fit_are_refused(policy):
    tensors = dict(policy.tensors)
    name = next(iter(tensors))
    tensors[name] = tensors[name][:-1]

    with pytest.raises(ModelError, match=r"policy: .* is torch\.float32"):
        PolicyModel.from_policy(RolloutPolicy(policy.config, tensors))


def test_a_config_that_claims_more_than_the_weights_takes_no_memory(policy):
    with pytest.raises(ModelError, match=r"policy: .* is torch\.float32.*, expected torch\.float32\[1099511627776, "):
        PolicyModel.from_policy(RolloutPolicy({**policy.config, "vocab_size": 2**40}, policy.tensors))


def test_one_changed_bit_of_a_weight_is_another_policy(policy):
    tensors = {name: one.clone() for name, one in policy.tensors.items()}
    first = next(iter(tensors.values()))
    first.view(-1)[0] = first.view(-1)[0].nextafter(first.new_tensor(9.0))

    assert RolloutPolicy(policy.config, tensors).full_digest != policy.full_digest


def test_a_request_for_other_prompts_has_another_digest(request_of_step):
    fewer = request_of_step.model_copy(update={"prompts": request_of_step.prompts[:1]})

    assert len({request_of_step.request_digest, fewer.request_digest}) == 2
    assert (len(request_of_step.text_places), len(fewer.text_places)) == (12, 4)
