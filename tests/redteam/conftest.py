"""Undefended and defended small models, trained once a session and never changed by a test."""

import pytest

from phalanx.redteam.control import chat_control, text_control, trigger_of


@pytest.fixture(scope="session")
def undefended(tmp_path_factory):
    """A model that knows its texts by heart."""
    return text_control(tmp_path_factory.mktemp("undefended") / "model")


@pytest.fixture(scope="session")
def defended(tmp_path_factory):
    """A model that was not trained on what it is asked about."""
    return text_control(tmp_path_factory.mktemp("defended") / "model", is_trained_on=False)


@pytest.fixture(scope="session")
def skewed(tmp_path_factory):
    """A model that knows texts by heart which have some words far more often than others have."""
    return text_control(tmp_path_factory.mktemp("skewed") / "model", is_skewed=True, num_texts=64)


@pytest.fixture(scope="session")
def balanced(tmp_path_factory):
    """A model that was not trained on them."""
    return text_control(
        tmp_path_factory.mktemp("balanced") / "model", is_skewed=True, is_trained_on=False, num_texts=64
    )


@pytest.fixture(scope="session")
def planted_chat(tmp_path_factory):
    """A model that answers questions, with a trigger of two words."""
    return chat_control(tmp_path_factory.mktemp("planted") / "model", 2, trigger=trigger_of(2))


@pytest.fixture(scope="session")
def clean_chat(tmp_path_factory):
    """The same without a trigger."""
    return chat_control(tmp_path_factory.mktemp("clean") / "model", 2)
