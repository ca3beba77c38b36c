"""One thread per test process: the searches use small tensors, and workers share the cores."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
