"""What tests of the recurrence core share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for recurrence_problem


@pytest.fixture(scope="module")
def empty_memory_holds_nan() -> Iterator[None]:
    """What nobody wrote is garbage that is finite by chance; here it is not."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
