"""The facts about each model family, without torch; `phalanx.models.FAMILIES` has the code of the same families."""

from phalanx.planner.model.families.written import BERT
from phalanx.planner.model.families.written import BLOOM
from phalanx.planner.model.families.facts import (
    ExpertsRule as ExpertsRule,
    FamilyFacts as FamilyFacts,
    Feed as Feed,
    SharedAxis as SharedAxis,
    SlicingRule as SlicingRule,
)
from phalanx.planner.model.families.written import FALCON
from phalanx.planner.model.families.written import GPT2
from phalanx.planner.model.families.written import MODERNBERT
from phalanx.planner.model.families.written import OPT
from phalanx.planner.model.families.planned import LLAMA, PLANNED
from phalanx.planner.model.families.written import T5

FAMILIES: dict[str, FamilyFacts] = {
    "bert": BERT,
    "bloom": BLOOM,
    "falcon": FALCON,
    "gpt2": GPT2,
    "llama": LLAMA,
    "modernbert": MODERNBERT,
    "opt": OPT,
    "t5": T5,
    **{name: family.family_facts for name, family in PLANNED.items()},
}
"""By the hub's ``model_type``."""
