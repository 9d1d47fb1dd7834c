"""One command from the user's own text to a chat: a plan by measured speed, ordinary run files, phases that resume.

The plan is there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.laptop.folder import make_folder as make_folder, make_rows as make_rows, open_plan as open_plan
from phalanx.laptop.plan import (
    LaptopPlan as LaptopPlan,
    PlanGrounds as PlanGrounds,
    LaptopRequest as LaptopRequest,
    RowCounts as RowCounts,
    choose_vocabulary as choose_vocabulary,
    make_plan as make_plan,
)
from phalanx.laptop.texts import read_texts as read_texts
from phalanx.laptop.vocabulary import fit_vocabulary as fit_vocabulary
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.laptop.entry import Interrupted as Interrupted, LaptopRun as LaptopRun, in_words as in_words
    from phalanx.laptop.probe import choose_threads as choose_threads, measure_costs as measure_costs


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
