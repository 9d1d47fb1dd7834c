"""The whole model of a federated run, as its owner measures it and a site of one process trains it."""

from phalanx.errors import ConfigError
from phalanx.federated.site_trainer import Learning, WholeModel
from phalanx.models import ModelSource
from phalanx.train.config import FederatedRun
from phalanx.train.setup.layout import check_head, check_virtual_tokens
from phalanx.train.setup.row_attention import attention_kind


def load_whole_model(run: FederatedRun, source: ModelSource, num_classes: int) -> WholeModel:
    """Load the model of a run, with what its sites train of it."""
    precision = run.train.precision
    if precision == "fp16":
        raise ConfigError('train.precision = "fp16": sites have no loss scale; set it to "bf16" or "fp32"')
    if not num_classes:
        check_head(run, source)
    check_virtual_tokens(run, source)
    learning = Learning(
        run.train.objective, num_classes, attention_kind(run, source), precision, run.train.neftune_alpha
    )
    model = WholeModel(source, run.model, run.train.seed, learning, frozen_a=run.federated.exchange == "frozen_a")
    model.make_personal(run.federated.personal)
    return model
