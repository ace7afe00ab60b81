"""What one process exports is the same model, whatever mesh wrote the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

MESHES = [(2, "2x1x1"), (2, "1x2x1"), (2, "1x1x2"), (4, "1x2x2"), (4, "2x1x2")]


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl"])
@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_a_mesh_s_checkpoint_is_exported_by_one_process(
    command: Any, folder: Any, tmp_path: Path, processes: int, mesh: str, model: str
) -> None:
    def exported(processes: int, mesh: str) -> dict[str, torch.Tensor]:
        run = folder(processes, f"again-{mesh}-{model}") / "run"
        code, _, err = command("checkpoint", "export", run, "--output", tmp_path / mesh)
        assert code == 0, err
        return load_file(tmp_path / mesh / "model.safetensors")

    expected, found = exported(1, "1x1x1"), exported(processes, mesh)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-6)
        assert error < 1e-9, name
