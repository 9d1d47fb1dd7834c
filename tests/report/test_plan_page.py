"""A plan's page holds everything, fetches nothing, and shows bars, bubbles, refusals and sources."""

import re
from pathlib import Path

import pytest

from phalanx.errors import InputError
from phalanx.planner.cluster.catalog import known_clusters, known_models
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.search.answer import PlanAnswer, answer_question
from phalanx.planner.search.question import Question
from phalanx.report.plan_page import render_plan, write_plan


@pytest.fixture(scope="module")
def answer() -> PlanAnswer:
    recipe = Recipe(32, 1024, precision="bf16")
    return answer_question(
        Question("<gpt2>", known_models()["gpt2"], recipe, known_clusters()["a100-nodes"], (8,), tokens=1e10)
    )


def test_the_page_asks_nobody_for_anything(answer: PlanAnswer) -> None:
    page = render_plan(answer)

    assert "default-src &#x27;none&#x27;" in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert "&lt;gpt2&gt;" in page
    assert "<gpt2>" not in page


def test_memory_time_and_the_pipeline_are_drawn(answer: PlanAnswer) -> None:
    page = render_plan(answer)

    assert page.count("<svg") == 3
    for part in ("parameters", "gradients", "optimizer", "activations", "buffers", "limit 73.6 GiB"):
        assert part in page
    assert "Timeline of a pipeline" in page
    found = answer.best_pipeline()
    assert found is not None
    assert f"{100 * found[1].bubble_share:.1f} % of the shown time is idle" in page
    assert page.count("microbatch 0:") >= 2 * found[0].layout.pp


def test_figures_stand_beside_what_they_rest_on(answer: PlanAnswer) -> None:
    page = render_plan(answer)

    assert answer.best_layout is not None
    assert f"<h1>{answer.best_layout.layout}</h1>" in page
    assert "efficiency" in page
    assert "https://www.mercatus-ai.com/blog/cloud-gpu-pricing" in page


def test_a_plan_without_a_layout_says_why() -> None:
    recipe = Recipe(8, 2048, precision="bf16")
    shape, cluster = known_models()["gpt3-175b"], known_clusters()["a100-nodes"]

    page = render_plan(answer_question(Question("gpt3", shape, recipe, cluster, (1,))))

    assert "No usable layout" in page
    assert "most is optimizer" in page


def test_a_mixed_pool_shows_who_has_which_layers() -> None:
    recipe = Recipe(32, 1024, precision="fp16")

    page = render_plan(
        answer_question(Question("xl", known_models()["gpt2-xl"], recipe, known_clusters()["paper-pool"], (4,)))
    )

    assert "Layers of the stages: " in page
    assert "quadro-rtx-5000" in page


def test_the_page_is_replaced_whole(answer: PlanAnswer, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.html", answer)

    assert path.read_text(encoding="utf-8").endswith("</html>")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="cannot be written"):
        write_plan(tmp_path / "nowhere" / "plan.html", answer)
