"""One valid run, and ways to break it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.load import load_typed, write_yaml
from rlt_dist.config.run import RunConfig
from rlt_dist.util.errors import UserError

RLT = {"kind": "rlt", "d_model": 8, "heads": 2, "ffn": 12}
RLT |= {"encoder_layers": 2, "decoder_layers": 2, "memory_len": 16}
TRANSFORMER_XL = {"kind": "transformer_xl", "d_model": 8, "heads": 2, "d_inner": 12}
TRANSFORMER_XL |= {"layers": 2, "memory_len": 4}
MODELS = {"rlt": RLT, "transformer_xl": TRANSFORMER_XL, "gru": {"kind": "gru", "d_model": 8}}


class Runs:
    """Writes run files and loads them; a fixture, so that files share it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.yaml"

    def content(self, model: str = "rlt") -> dict[str, Any]:
        """The plain content of a valid run file."""
        return copy.deepcopy(
            {
                "run_folder": "runs/a",
                "model": MODELS[model],
                "data": {"path": "corpus", "lanes": 4, "segment": 8},
                "optimizer": {"learning_rate": 0.001},
                "train": {"steps": 10},
            }
        )

    def load(
        self, text: str | bytes | None = None, *overrides: str, model: str = "rlt"
    ) -> RunConfig:
        """Load a run file of this text (None: the valid one)."""
        text = write_yaml(self.content(model)) if text is None else text
        self.path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_typed(self.path, RunConfig, overrides)

    def refuse(self, text: str | bytes | None = None, *overrides: str, model: str = "rlt") -> str:
        """The message with which a run file is refused."""
        with pytest.raises(UserError) as refused:
            self.load(text, *overrides, model=model)
        return str(refused.value)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def round_trip(runs: Runs) -> Callable[[RunConfig], RunConfig]:
    """What a configuration's own YAML loads as."""
    return lambda config: runs.load(config.to_yaml())
