"""Texts by a trained model: from a run, one of its checkpoints, or a directory in the hub's layout."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.batch import complete_file as complete_file
    from phalanx.serve.chat_writer import ChatWriter as ChatWriter
    from phalanx.serve.sampling import Completion as Completion, SamplingRule as SamplingRule
    from phalanx.serve.classifier_model import ClassifierModel as ClassifierModel, classify_file as classify_file
    from phalanx.serve.text_model import TextModel as TextModel
    from phalanx.serve.where import open_classifier as open_classifier, open_text_model as open_text_model


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
