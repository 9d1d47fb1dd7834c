"""What a run file may say about its optimizer."""

import pytest

from phalanx.config import load_config
from phalanx.errors import ConfigError
from phalanx.optimizers import OptimizerConfig


def load(tmp_path, text):
    path = tmp_path / "optimizer.toml"
    path.write_text(text)
    return load_config(path, OptimizerConfig)


def test_an_optimizer_section_is_read_from_toml(tmp_path):
    config = load(tmp_path, 'lr = 3e-4\nbetas = [0.8, 0.9]\nschedule = "constant"\nwarmup_steps = 5')

    assert (config.lr, config.betas, config.schedule, config.warmup_steps) == (
        3e-4,
        (0.8, 0.9),
        "constant",
        5,
    )
    assert (config.kind, config.clip_norm) == ("adamw", 1.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "lr: missing"),
        ("lr = 0.0", "lr: found 0.0"),
        ("lr = nan", "lr"),
        ("lr = inf", "lr"),
        ("lr = 1e-3\nbetas = [0.9, 1.0]", r"betas\.1: found 1.0"),
        ("lr = 1e-3\nbetas = [0.9]", "betas"),
        ("lr = 1e-3\neps = 0", "eps"),
        ("lr = 1e-3\nweight_decay = -0.1", "weight_decay"),
        ("lr = 1e-3\nclip_norm = 0.0", "clip_norm"),
        ("lr = 1e-3\nwarmup_steps = -1", "warmup_steps"),
        ("lr = 1e-3\nwarmup_share = 0.6", "warmup_share"),
        ("lr = 1e-3\nwarmup_steps = 5\nwarmup_share = 0.1", "warmup_steps = 5 beside warmup_share = 0.1"),
        ("lr = 1e-3\nmin_lr_ratio = 1.5", "min_lr_ratio"),
        ('lr = 1e-3\nschedule = "step"', "schedule"),
        ("lr = 1e-3\ndecay_share = 0.5", "decay_share has no meaning with schedule"),
        ('lr = 1e-3\nschedule = "wsd"\ndecay_share = 0.0', "decay_share"),
        ('lr = 1e-3\nkind = "adafactor"\nbetas = [0.8, 0.9]', "betas has no meaning"),
        ('lr = 1e-3\nkind = "lion"', "kind"),
        ("lr = 1e-3\nmomentum = 0.5", "momentum has no meaning"),
        ('lr = 1e-3\nkind = "sgd"\neps = 1e-6', "eps has no meaning"),
        ("lr = 1e-3\ndampening = 0.9", "dampening: unknown key"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path, text, named):
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, text)
