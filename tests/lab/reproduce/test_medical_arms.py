"""The arms on a tiny random model: what they share, what they must agree on, and what each does to the clients."""

from dataclasses import replace

import pytest
import torch
from numpy import float32
from numpy import zeros as zeros_of

from phalanx.data.tasks import Example
from phalanx.errors import ModelError
from phalanx.lab.reproduce.medical.arms import ARMS
from phalanx.lab.reproduce.medical.bench import ArmMaterial
from phalanx.lab.reproduce.medical.cell import MedicalCell, run_cell
from phalanx.lab.reproduce.medical.front import NoisyFront, RememberedFront, epsilon_of, typical_length
from phalanx.lab.reproduce.medical.material import Material, deal_rows
from phalanx.lab.reproduce.medical.size import EPSILON, MedicalSize
from phalanx.models import ModelConfig, open_model
from phalanx.objectives import ConfusionMatrix, mark_classes
from phalanx.split import FrontPart
from phalanx.train.batches.labelled import LabelledRows

VOCAB, TOKENS = 64, 6
TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "tie_word_embeddings": True,
}
SIZE = MedicalSize(
    tasks=("made",), seeds=(0,), train=48, test=24, tokens=TOKENS, epochs=3, layers=3, cut=2, rows=2, rank=2, lr=2e-2
)


def made_rows(count, seed):
    """Two classes with six tokens each."""
    draw = torch.Generator().manual_seed(seed)
    classes = tuple(n % 2 for n in range(count))
    lengths = [2 + n % (TOKENS - 1) for n in range(count)]
    ids = torch.randint(6, (count, TOKENS), generator=draw)
    ids += torch.tensor(classes).unsqueeze(1) * (VOCAB // 2)
    return LabelledRows(ids, mark_classes(classes, lengths, TOKENS), classes)


def texts(rows):
    words = {0: "cough fever", 1: "fracture bone"}
    return tuple(Example(f"{words[label]} {n}", label) for n, label in enumerate(rows.classes))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    source = open_model(ModelConfig(from_scratch=True, architecture=TINY), tmp_path_factory.mktemp("models"), seed=3)
    source = source.with_first_blocks(SIZE.layers)
    train, test = made_rows(SIZE.train, 0), made_rows(SIZE.test, 1)
    # the first two clients have one class each
    by_class = [tuple(n for n in range(24) if train.classes[n] == label) for label in (0, 1)]
    clients = (*by_class, tuple(range(24, 32)), tuple(range(32, 48)))
    material = Material(2, train, test, clients, texts(train), texts(test), texts(train), texts(test))
    front = RememberedFront(FrontPart(source, SIZE.cut))
    return ArmMaterial(source, front, typical_length(front, train.ids[:2]), material, SIZE, seed=0)


class Outcomes(dict):
    """Plays an arm when it is first asked for."""

    def __init__(self, bench):
        super().__init__()
        self.bench = bench

    def __missing__(self, name):
        self[name] = ARMS[name](self.bench)
        return self[name]


@pytest.fixture(scope="module")
def outcomes(bench):
    return Outcomes(bench)


def test_sealed_and_plain_split_agree_in_every_bit(outcomes):
    plain, sealed = outcomes["split_plain"], outcomes["split_sealed"]

    assert sealed.digest == plain.digest
    assert sealed.more["losses"] == plain.more["losses"]
    assert sealed.scores == plain.scores
    assert sealed.more["bytes_crossed"] > plain.more["bytes_crossed"]


@pytest.mark.parametrize("name", ["centralised", "fedavg", "split_plain"])
def test_who_learns_from_all_clients_learns_the_task(outcomes, name):
    assert outcomes[name].scores[0].accuracy >= 0.9
    assert outcomes[name].loss_last < 0.5


def test_clients_alone_are_scored_one_by_one_and_none_of_them_has_learned_what_all_have(outcomes):
    alone = outcomes["local"]

    assert alone.more["client_accuracy"] == [score.accuracy for score in alone.scores]
    assert len(set(alone.more["client_accuracy"])) > 1
    assert min(alone.more["client_accuracy"]) < outcomes["split_plain"].scores[0].accuracy


def test_arms_end_with_different_weights(outcomes):
    digests = [outcomes[name].digest for name in ("centralised", "fedavg", "split_plain", "split_noised")]

    assert len(set(digests)) == 4


def test_a_secure_sum_of_equal_clients_is_their_mean(bench):
    clients = tuple(tuple(range(start, start + 12)) for start in range(0, 48, 12))
    equal = replace(bench, material=replace(bench.material, clients=clients))

    plain, secure = ARMS["fedavg"](equal), ARMS["fedavg_secure"](equal)

    assert secure.scores == plain.scores
    assert secure.loss_last == pytest.approx(plain.loss_last, abs=1e-3)


def test_one_liar_of_five_wins_over_the_mean_and_not_over_the_robust_rule(outcomes):
    honest, attacked, robust = (
        outcomes[name].scores[0].accuracy for name in ("fedavg", "fedavg_attacked", "fedavg_robust")
    )

    assert attacked <= honest - 0.3
    assert robust >= honest - 0.1


# what is drawn and spent has quick tests in tests/federated
@pytest.mark.slow
def test_private_rounds_spend_their_epsilon_and_the_noise_is_real(bench, outcomes, monkeypatch):
    private = outcomes["fedavg_private"]
    assert 0.9 * EPSILON < private.more["epsilon"] <= EPSILON
    monkeypatch.setattr(
        "phalanx.lab.reproduce.medical.federated.gaussian_noise", lambda _, count, __: zeros_of(count, float32)
    )
    monkeypatch.setattr("phalanx.lab.reproduce.medical.federated._CLIP", 1e6)

    without = ARMS["fedavg_private"](bench)

    assert without.scores[0].accuracy >= 0.9
    assert without.digest != private.digest


def test_an_arm_repeated_has_the_same_bits(bench, outcomes):
    again = ARMS["split_noised"](bench)

    assert (again.digest, again.scores) == (outcomes["split_noised"].digest, outcomes["split_noised"].scores)


def test_much_noise_leaves_nothing_to_learn(bench, monkeypatch):
    monkeypatch.setattr("phalanx.lab.reproduce.medical.arms.NOISE", 1000.0)

    assert ARMS["split_noised"](bench).scores[0].accuracy < 0.9


@pytest.mark.slow
def test_a_masked_enclave_learns_what_the_sealed_one_learns(bench, outcomes):
    masked = ARMS["split_masked"](bench)

    assert masked.scores[0].accuracy == pytest.approx(outcomes["split_sealed"].scores[0].accuracy, abs=0.1)
    assert masked.loss_last == pytest.approx(outcomes["split_sealed"].loss_last, abs=0.02)


def test_words_alone_tell_these_classes_apart(bench):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed; install phalanx-train[tasks]")

    assert ARMS["tfidf"](bench).scores[0].accuracy == 1.0


def test_a_row_has_the_figures_and_no_list_of_losses(bench):
    row = run_cell(MedicalCell("made", 0, "split_sealed"), bench)

    assert row["client_texts"] == [12, 12, 8, 16]
    assert row["client_classes"] == [1, 1, 2, 2]
    assert row["majority"] == 0.5
    assert row["steps"] == 3 * 48 // 8
    assert len(row["losses_digest"]) == 64
    assert "losses" not in row


def test_a_text_is_dealt_once_in_every_pass():
    dealt = deal_rows(tuple(range(10, 17)), 3, seed=0, client=1)

    seen = [index for _ in range(7) for index in next(dealt)]

    assert sorted(seen[:7]) == sorted(seen[7:14]) == sorted(seen[14:]) == list(range(10, 17))
    assert seen[:7] != seen[7:14]


def test_what_the_front_makes_of_a_text_does_not_depend_on_its_company(bench):
    ids = bench.material.test.ids
    fresh, other = (RememberedFront(bench.front._front) for _ in range(2))

    one = fresh(ids[3:4])
    many = other(ids[:8])

    assert torch.equal(one[0], many[3])
    assert fresh.with_wire("bf16")(ids[:1]).dtype == torch.bfloat16


def test_noise_is_drawn_once_for_a_text_and_clipping_holds(bench):
    ids = bench.material.test.ids[:4]
    silent = NoisyFront(bench.front, 0.5, 0.0, seed=0)
    noisy = NoisyFront(bench.front, 0.5, 0.25, seed=0)

    assert float(silent(ids).norm(dim=2).max()) <= 0.5 + 1e-5
    assert torch.equal(noisy(ids)[1], noisy(ids[1:2])[0])
    assert not torch.equal(noisy(ids), NoisyFront(bench.front, 0.5, 0.25, seed=1)(ids))
    added = noisy(ids) - silent(ids)
    assert float(added.std()) == pytest.approx(0.25 * 0.5, rel=0.15)


def test_epsilon_is_that_of_the_exact_gaussian_mechanism():
    # sigma = 3.7306 for (1, 1e-5) and sensitivity 1, from the paper's algorithm; ours is in clipping lengths, of two
    assert epsilon_of(2 * 3.7306, 1e-5) == pytest.approx(1.0, abs=2e-3)
    assert epsilon_of(0.25) > epsilon_of(1.0) > epsilon_of(10.0) > 0
    assert epsilon_of(1e-3) == float("inf")


def test_a_model_can_be_shortened_but_not_lengthened(bench):
    assert bench.source.num_layers == 3
    with pytest.raises(ModelError, match="has 3 blocks; 4"):
        bench.source.with_first_blocks(4)


def test_the_score_is_of_the_test_texts(bench, outcomes):
    counts = outcomes["split_plain"].scores[0]

    assert isinstance(counts, ConfusionMatrix)
    assert sum(map(sum, counts.counts)) == SIZE.test
