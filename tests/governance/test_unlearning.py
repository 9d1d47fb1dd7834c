"""Approximate unlearning: a text is hidden, relearning brings it back, and who asks for erasure does not accept it."""

import copy
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_erasure import SECRET, write_dataset, write_run_file
from transformers import GPT2Config, GPT2LMHeadModel

from phalanx.cli.outcome import run_command
from phalanx.data.shards import document_digest
from phalanx.errors import TrainingError
from phalanx.governance import passport as passport_module
from phalanx.governance.passport import PassportChoice, make_passport
from phalanx.governance.relearning import (
    Comeback,
    RelearningFinding,
    RelearningPlan,
    TextScore,
    cut_rows,
    judge_relearning,
    score_text,
    token_losses,
)
from phalanx.governance.unlearning import (
    STATE,
    UnlearningPlan,
    UnlearningResult,
    UnlearningTexts,
    bounded_ascent,
    unlearn_text,
)
from phalanx.train import PastRun, load_run, train

VOCABULARY, LENGTH = 64, 48
TEST = RelearningPlan(rate=1e-3, length=64)


class World(NamedTuple):
    """A model that has memorised a text, one that never had it, and what unlearning made of the first."""

    memorised: Any
    never: Any
    unlearned: Any
    texts: UnlearningTexts
    result: UnlearningResult


@pytest.fixture(scope="module")
def world() -> World:
    chance = random.Random(1)
    successors = [chance.sample(range(1, VOCABULARY), 4) for _ in range(VOCABULARY)]

    def make_text() -> tuple[int, ...]:
        text = [chance.randrange(1, VOCABULARY)]
        while len(text) < LENGTH:
            text.append(chance.choice(successors[text[-1]]))
        return tuple(text)

    retained, never_seen = [make_text() for _ in range(80)], tuple(make_text() for _ in range(19))
    secret = make_text()
    texts = UnlearningTexts(secret, tuple(retained[:32]), tuple(retained[32:64]), never_seen)
    memorised, never = fit([*retained, *[secret] * 8]), fit(retained)
    unlearned = copy.deepcopy(memorised)
    return World(memorised, never, unlearned, texts, unlearn_text(unlearned, texts, UnlearningPlan(), TEST))


def fit(texts: list[tuple[int, ...]]) -> Any:
    torch.manual_seed(1)
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, **options))
    optimizer, chance = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(1)
    for _ in range(200):
        losses, mask = token_losses(model, [chance.choice(texts) for _ in range(16)])
        optimizer.zero_grad()
        losses[mask].mean().backward()
        optimizer.step()
    return model.eval()


def test_the_text_was_written_word_for_word_and_is_as_unlikely_as_texts_never_seen_after(world: World) -> None:
    before, after = world.result.scores

    # the attack that types the first token and takes the likeliest next ones wins before, and fails after
    assert before.likeliest == 1.0
    assert after.likeliest < 0.6
    unseen = sum(world.result.never_seen[0]) / len(world.result.never_seen[0])
    assert world.result.has_reached
    assert before.loss < 0.2 < unseen <= after.loss
    facts = world.result.to_json()
    assert facts["retained"]["after"]["value"] < unseen
    assert (
        facts["retained"]["before"]["low"] < facts["retained"]["before"]["value"] < facts["retained"]["before"]["high"]
    )


def test_relearning_one_half_brings_the_other_back_and_of_a_model_that_never_had_it_does_not(world: World) -> None:
    finding = world.result.relearning

    assert finding.is_hidden
    assert finding.forgotten.gain > max(finding.never_seen)
    assert "hidden, not removed" in finding.meaning
    control = judge_relearning(world.never, world.texts.forgotten, world.texts.never_seen, TEST)
    assert control.is_decidable
    assert not control.is_hidden
    assert "does not show that there is none" in control.meaning


def test_the_seed_decides_every_bit(world: World) -> None:
    models = [copy.deepcopy(world.memorised) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        unlearn_text(
            model, replace(world.texts, never_seen=world.texts.never_seen[:1]), UnlearningPlan(4, seed=seed), TEST
        )

    first, second, other = (model.lm_head.weight for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_too_few_steps_do_not_count_as_unlearned(world: World) -> None:
    result = unlearn_text(copy.deepcopy(world.memorised), world.texts, UnlearningPlan(1), TEST)

    assert not result.has_reached
    assert not result.is_decidable


def test_weights_that_are_no_numbers_are_refused(world: World) -> None:
    broken = copy.deepcopy(world.memorised)
    broken.transformer.h[0].mlp.c_fc.weight.data.fill_(math.nan)

    with pytest.raises(TrainingError, match="no number"):
        unlearn_text(broken, world.texts, UnlearningPlan(1), TEST)


def test_ascent_spares_tokens_at_chance_and_rows_at_the_target() -> None:
    losses = torch.tensor([[1.0, 5.0, 2.0], [3.0, 4.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])

    loss = bounded_ascent(losses, mask, chance=4.5, target=3.0)
    loss.backward()

    # the second row has reached a mean of 3.5, and the second token of the first is above chance
    assert float(loss.detach()) == pytest.approx(-(1.0 + 2.0) / 5)
    assert losses.grad is not None
    assert losses.grad.flatten().tolist() == pytest.approx([-0.2, 0.0, -0.2, 0.0, 0.0, 0.0])


def test_scores_of_a_second_half_are_of_its_tokens_alone(world: World) -> None:
    text = world.texts.forgotten[:24] * 3

    whole, second = (score_text(world.memorised, text, 32, start) for start in (0, 40))

    rows = cut_rows(text, 32)
    losses, mask = token_losses(world.memorised, rows)
    assert [len(row) for row in rows] == [32, 32, 8]
    assert whole.loss == pytest.approx(float(losses[mask].detach().mean()), rel=1e-5)
    # the second row from its ninth token on, and the third but its first, which nothing comes before
    expected = torch.cat([losses[1, 7:], losses[2, :7]])
    assert second.loss == pytest.approx(float(expected.detach().mean()), rel=1e-5)
    assert math.isnan(score_text(world.memorised, text, 32, len(text)).loss)


def finding_of(gain: float, unseen: list[float]) -> RelearningFinding:
    return RelearningFinding(Comeback((TextScore(4.0, 0.0), TextScore(4.0 - gain, 0.0))), None, tuple(unseen))


@pytest.mark.parametrize(
    ("gain", "unseen", "is_hidden", "is_decidable"),
    [
        (2.0, [1.0] * 19, True, True),
        (2.0, [1.0] * 18, False, False),  # with so few the first rank is no rarity
        (2.0, [1.0] * 18 + [2.0], False, True),  # a tie is as fast
        (2.0, [1.0] * 18 + [math.nan], False, False),
        (math.nan, [1.0] * 19, False, False),
    ],
)
def test_the_document_is_found_by_its_rank_among_texts_never_seen(
    gain: float, unseen: list[float], *, is_hidden: bool, is_decidable: bool
) -> None:
    finding = finding_of(gain, unseen)

    assert (finding.is_hidden, finding.is_decidable) == (is_hidden, is_decidable)


def make_texts() -> list[str]:
    """Return 150 texts: the secret, other texts of its kind, and as each fifth one that no step sees."""
    chance = random.Random(2)
    words = sorted({"".join(chance.choices("jkqvwxz", k=2)) for _ in range(60)})
    return [SECRET if number % 5 == 0 else " ".join(chance.choices(words, k=16)) for number in range(150)]


@pytest.mark.slow
def test_an_unlearned_model_of_a_run_is_not_accepted_as_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attacker is the owner, who hands the unlearned model over as the one of the run without the document."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    home = write_dataset(tmp_path / "data", make_texts())
    run_file = write_run_file(tmp_path / "run.toml", home, "concatenate", 200, 100)
    text = run_file.read_text().replace("n_positions = 16", "n_positions = 64")
    run_file.write_text(text.replace("sequence_length = 16", "sequence_length = 64"))
    train(load_run(run_file), tmp_path / "old")
    digest = document_digest(SECRET)
    old, new, unlearned = (str(tmp_path / name) for name in ("old", "new", "unlearned"))

    def run_json(*words: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = run_command([*words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, facts = run_json("unlearn", digest, "--run", old, "--out", unlearned)
    assert code == 0
    assert facts["state"] == STATE
    assert facts["forgotten"]["before"]["loss"] < facts["never_seen"]["before"]["value"] / 2
    assert facts["forgotten"]["after"]["loss"] >= facts["never_seen"]["before"]["value"]
    assert facts["relearning"]["is_hidden"]
    assert run_command(["unlearn", digest, "--run", old, "--out", unlearned]) == 3

    # whoever opens the files reads what they are
    record = json.loads((tmp_path / "unlearned" / "unlearning.json").read_bytes())
    assert (record["state"], record["document"], record["run"]) == (STATE, digest, PastRun(tmp_path / "old").run_id)
    assert json.loads((tmp_path / "unlearned" / "config.json").read_bytes())["unlearning"] == STATE
    assert STATE in (tmp_path / "unlearned" / "README.md").read_text()
    assert STATE in run_json("verify", unlearned)[1]["state"]
    code, facts = run_json("model", "verify", unlearned, old)
    assert (code, facts["comparison"]) == (7, STATE)
    passport = str(tmp_path / "old.passport")
    assert run_command(["passport", old, "--out", passport, "--export", unlearned, "--document", digest]) == 0
    assert STATE in capsys.readouterr().out

    # the model of exact erasure is shown never to have seen the document
    places = ["--data-out", str(tmp_path / "without"), "--out", new]
    assert run_command(["erase", digest, "--run", old, *places]) == 0
    erased = str(tmp_path / "erased")
    assert run_command(["checkpoint", "export", new, erased]) == 0
    honest = str(tmp_path / "new.passport")
    assert run_command(["passport", new, "--out", honest, "--model", erased, "--document", digest]) == 0
    assert run_command(["verify", honest, "--model", erased, "--absent", digest]) == 0

    # the old run's passport: the document is in its data, and the unlearned weights are not its own
    assert run_command(["verify", passport, "--absent", digest]) == 5
    assert run_command(["passport", old, "--out", str(tmp_path / "a"), "--model", unlearned]) == 5
    # the new run's: its own model is another
    assert run_command(["verify", honest, "--model", unlearned, "--absent", digest]) == 5
    assert run_command(["passport", new, "--out", str(tmp_path / "b"), "--model", unlearned]) == 5
    # a program that the owner has changed signs it all the same
    weights = PastRun(tmp_path / "new").final_weights_digest
    monkeypatch.setattr(passport_module, "verify_run_export", lambda *args, **options: weights)
    forged = str(tmp_path / "forged.passport")
    choice = PassportChoice(model=tmp_path / "unlearned", documents=(digest,))
    make_passport(PastRun(tmp_path / "new"), Path(forged), choice)
    assert run_command(["verify", forged, "--model", unlearned]) == 7
    assert run_command(["verify", forged, "--model", unlearned, "--absent", digest]) == 5
    # and neither a statement nor a policy takes a directory for a run
    assert run_command(["verify", unlearned, "--absent", digest]) == 5
    assert run_command(["policy", "check", unlearned]) != 0
