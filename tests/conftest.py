"""Options and fixtures shared by all tests."""

from pathlib import Path

import pytest
import torch

# Tests run in several processes at once; one thread each keeps them from fighting over the cores.
torch.set_num_threads(1)

DEFAULT_GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        type=Path,
        default=DEFAULT_GOLDEN,
        help="folder of reference fixtures (default: ../shared/golden)",
    )


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Path:
    """Folder of reference fixtures; tests that need it skip when it is absent."""
    folder: Path = request.config.getoption("--golden")
    if not folder.is_dir():
        pytest.skip(f"no fixtures at {folder}; pass --golden DIR")
    return folder
