"""Kernels in triton's interpreter. Files of tests begin with `pytest.importorskip("triton")`."""

import torch

# Where there is a GPU they are compiled, and tests/gpu holds them to float64.
collect_ignore_glob = ["*"] if torch.cuda.is_available() else []
