"""Labelled texts, to be classified; to add a task: one file, one line of the table. Loads no torch.

Nothing of them is part of Phalanx and nothing is fetched: some come with Python packages or Python itself, the others
from files that the user has (`files.find_file`). None of these holds a patient's record. Texts of a user's own are read
by `own`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from phalanx.data.tasks.drug_reviews import DRUG_REVIEWS
from phalanx.data.tasks.icd10 import ICD10
from phalanx.data.tasks.medical_abstracts import MEDICAL_ABSTRACTS
from phalanx.data.tasks.medquad import MEDQUAD
from phalanx.data.tasks.own import Columns as Columns, load_own as load_own, read_examples as read_examples
from phalanx.data.tasks.pubmedqa import PUBMEDQA, PUBMEDQA_SECTIONS
from phalanx.data.tasks.python_functions import PYTHON_FUNCTIONS
from phalanx.data.tasks.reuters_topics import REUTERS_TOPICS
from phalanx.data.tasks.split import TEST_SHARE as TEST_SHARE, ClientShares as ClientShares, share_out as share_out
from phalanx.data.tasks.task import Example as Example, LabelledExamples as LabelledExamples, TaskCard as TaskCard
from phalanx.data.tasks.baseline import majority_share as majority_share, tfidf_predictions as tfidf_predictions

TASKS: Mapping[str, TaskCard] = MappingProxyType(
    {
        card.name: card
        for card in (
            ICD10,
            MEDQUAD,
            MEDICAL_ABSTRACTS,
            PUBMEDQA,
            DRUG_REVIEWS,
            PUBMEDQA_SECTIONS,
            REUTERS_TOPICS,
            PYTHON_FUNCTIONS,
        )
    }
)
