"""Models shared by the tests of this folder."""

from collections.abc import Iterator

import pytest
import torch

from tests.models.synthetic import make_model
from twining.models.glm5_next.model import Glm5Next


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Glm5Next:
    """Five layers (KDA, MLA, KDA, MLA sharing, MLA), sparse from 35 tokens, taps at 0 and 3."""
    return make_model(tmp_path_factory.mktemp("small"), taps=(3, 0))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
