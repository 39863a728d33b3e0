"""Fixtures of the engine's tests."""

import pytest

from hicache.engine.model import LoadedModel
from tests.engine.tiny_models import tiny_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model, loaded once: nobody changes it."""
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama")
