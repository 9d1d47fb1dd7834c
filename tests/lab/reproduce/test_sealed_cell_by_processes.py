"""The cell of the sealed split on a real task's small share: client and enclave in one process give what two give."""

import pytest

from phalanx.data.config import DataConfig, LabelledConfig, ModelTokenizerConfig
from phalanx.data.tasks import TASKS
from phalanx.data.tokenizers import load_tokenizer
from phalanx.engine import StepInputs
from phalanx.errors import DataError, ModelError
from phalanx.lab.reproduce.medical.arms import ARMS, WIRE
from phalanx.lab.reproduce.medical.bench import ArmMaterial
from phalanx.lab.reproduce.medical.front import RememberedFront, typical_length
from phalanx.lab.reproduce.medical.material import make_material
from phalanx.lab.reproduce.medical.size import CLIENTS, MODEL, MedicalSize
from phalanx.models import open_model
from phalanx.objectives import ConfusionMatrix
from phalanx.split import FrontPart, SplitConfig
from phalanx.train import SplitRun, TrainConfig
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.split_cluster import split_company
from phalanx.train.setup.process import deterministic_kernels

SIZE = MedicalSize(tasks=("icd10",), seeds=(0,), train=128, test=24, tokens=16, epochs=1)
TASK = "icd10"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    try:
        task = TASKS[TASK].load(None)
        source = open_model(MODEL, tmp_path_factory.mktemp("models"), 0).with_first_blocks(SIZE.layers)
    except (DataError, ModelError) as exc:
        pytest.skip(str(exc))
    material = make_material(task, load_tokenizer(ModelTokenizerConfig(), source.tokenizer_path), SIZE, 0)
    front = RememberedFront(FrontPart(source, SIZE.cut))
    return ArmMaterial(source, front, typical_length(front, material.train.ids[:2]), material, SIZE, seed=0)


def run_of(bench) -> SplitRun:
    """What `phalanx train` would be given for the cell."""
    return SplitRun(
        model=MODEL.model_copy(update={"layers": SIZE.layers, "adapter": SIZE.adapter_config}),
        data=DataConfig(
            labelled=LabelledConfig(task=TASK, texts_per_client=SIZE.train // CLIENTS, test_texts=SIZE.test),
            tokenizer=ModelTokenizerConfig(),
            sequence_length=SIZE.tokens,
        ),
        train=TrainConfig(
            steps=bench.arm_steps,
            seed=0,
            batch_size=SIZE.rows * CLIENTS,
            microbatches=CLIENTS,
            objective="classification",
        ),
        optimizer=SIZE.optimizer_config,
        split=SplitConfig(cut=SIZE.cut, clients=CLIENTS, wire=WIRE, allow_insecure_sim=True),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated. Use files:DeprecationWarning")
def test_a_client_and_an_enclave_in_processes_of_their_own_come_to_the_losses_and_answers_of_the_cell(bench, tmp_path):
    run, material = run_of(bench), bench.material
    cell = ARMS["split_sealed"](bench)

    losses, answers = [], []
    dealt = [bench.deal_microbatches(indices, client) for client, indices in enumerate(material.clients)]
    # a text has the same hidden states whatever texts it comes with, as in the cell
    front = bench.front.with_wire(WIRE)
    with (
        RunDirectory(tmp_path / "run", run, resume=False) as home,
        deterministic_kernels(1),
        split_company(run, home, bench.source, material.num_classes, front=front) as lead,
    ):
        for step in range(bench.arm_steps):
            ids, labels = zip(*(material.train.pick_rows(next(one)) for one in dealt), strict=True)
            losses.append(lead.train_step(step, StepInputs(ids, labels, SIZE.rows * CLIENTS)).loss)
        held_out = (material.test.pick_rows(range(at, at + SIZE.rows)) for at in range(0, SIZE.test, SIZE.rows))
        answers += lead.measure_held_out(bench.arm_steps, held_out).answers

    assert losses == cell.more["losses"] and len(losses) == bench.arm_steps >= 4
    assert ConfusionMatrix.count_answers(answers, material.test.classes, material.num_classes) == cell.scores[0]
