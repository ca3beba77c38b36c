"""The equality suite on the bundled demo model, whose drafters are really accepted.

Every combination of drafter, K, temperature and company is run here on a share of the fifty
prompts; `python -m tests.exactness.full` runs all of them on every combination.
"""

import pytest
import torch

from tests.exactness.demo_requests import CASES, NUM_PROMPTS, TEMPERATURES, make_requests
from tests.exactness.tools import Bench, assert_equal_runs, run
from twining.demo.paths import demo_paths
from twining.engine.offline import Result
from twining.errors import ConfigError

MAX_SEQ_LEN = 2048


@pytest.fixture(scope="module")
def bench() -> Bench:
    try:
        model_dir, drafter_dir = demo_paths()
    except ConfigError as err:
        pytest.skip(str(err))
    if drafter_dir is None:
        pytest.skip("the demo drafter is not part of this install")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench.load(model_dir, drafter_dir, MAX_SEQ_LEN)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def requests(bench):
    return {t: make_requests(demo_paths()[0], t) for t in TEMPERATURES}


@pytest.fixture(scope="module")
def known() -> dict[str, Result]:
    """Results of requests alone without a drafter, computed when first needed."""
    return {}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "{}-{}".format(*CASES[i]))
def test_same_tokens_alone_and_four_at_a_time(bench, requests, known, case, temperature):
    drafter, num_draft = CASES[case]
    chosen = requests[temperature][case :: len(CASES)]
    assert len(chosen) == NUM_PROMPTS // len(CASES)
    missing = [r for r in chosen if r.id not in known]
    known |= run(bench.engine(), missing)
    for max_seqs in (1, 4):
        engine = bench.engine(drafter, num_draft, max_seqs=max_seqs)
        got = run(engine, chosen)
        what = f"{drafter} {num_draft}, T {temperature}, {max_seqs} at a time"
        assert_equal_runs(known, got, what)
        if drafter == "dflash2" and num_draft == 7:
            assert engine.stats().num_accepted > 0
