"""Each rank writes its own share of a checkpoint; one that lacks a rank's file is not whole."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import checkpoint as dcp

from rlt_dist.checkpoint.manifest import MANIFEST, latest, read_manifest, verify
from rlt_dist.util.errors import UserError

LAST = Path("run", "checkpoints", "step-00000005")


@pytest.mark.parametrize("model", ["rlt1", "xl"])
def test_what_both_have_is_written_once_and_both_write_about_as_much(
    folder: Any, model: str
) -> None:
    manifest = verify(folder(2, f"save-{model}") / LAST)
    assert manifest.facts.mesh == "2x1x1"
    sizes = {name: of.bytes for name, of in manifest.files.items() if name != ".metadata"}
    assert sorted(sizes) == ["__0_0.distcp", "__1_0.distcp"]
    assert max(sizes.values()) < 1.3 * min(sizes.values())
    metadata = dcp.FileSystemReader(folder(2, f"save-{model}") / LAST).read_metadata()
    entries = metadata.state_dict_metadata
    written = sum(
        chunk.sizes.numel() * entry.properties.dtype.itemsize
        for entry in entries.values()
        for chunk in entry.chunks
    )
    assert written == manifest.tensor_bytes


def test_whole_tensors_are_as_large_on_every_mesh(folder: Any) -> None:
    sizes = {
        read_manifest(folder(processes, name) / "run/checkpoints/step-00000003").tensor_bytes
        for processes, name in [
            *[(2, f"again-{mesh}-rlt1") for mesh in ("2x1x1", "1x2x1", "1x1x2")],
            *[(4, f"again-{mesh}-rlt1") for mesh in ("1x2x2", "2x2x1", "1x4x1")],
        ]
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("lost", ["__0_0.distcp", "__1_0.distcp"])
def test_without_the_file_of_one_rank_it_is_refused_and_the_one_before_is_used(
    folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(folder(2, "save-rlt1") / LAST.parent, checkpoints)
    (checkpoints / LAST.name / lost).unlink()
    with pytest.raises(UserError, match=f"{LAST.name}: file {lost} is missing"):
        verify(checkpoints / LAST.name)
    assert latest(checkpoints) == checkpoints / "step-00000004"
    assert f"{LAST.name}: file {lost} is missing" in capsys.readouterr().err
    assert (checkpoints / LAST.name / MANIFEST).is_file()
