"""What an exported folder says of its model, held to a run's configuration."""

import json
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from rlt_dist.checkpoint.run_folder import describe_changes
from rlt_dist.config.load import Strict, validate
from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.util.errors import UserError

_FREE = {"dropout", "dropatt", "memory_len", "clamp_len", "same_length"}
"""May be chosen anew for the same parameters: how they are regularised, and how far they look."""


class About(Strict):
    """The content of config.json."""

    model: ModelConfig
    vocabulary: PositiveInt

    def to_json(self) -> str:
        """As a file."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


def read_about(path: Path) -> About:
    """Read config.json.

    Raises:
        UserError: it is missing, no JSON, or describes no model of ours.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a folder of `rlt-dist checkpoint export`")
    return validate(read_json(path), About, str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        UserError: it is none.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: is no JSON object; export the model again")
    return content


def check_same_model(stored: ModelConfig, wanted: ModelConfig, where: str) -> list[str]:
    """Hold a stored model's configuration to a run's, key by key.

    Returns:
        one text for each key that differs and may.

    Raises:
        UserError: others differ.
    """
    before, after = _resolved(stored), _resolved(wanted)
    if before["kind"] != after["kind"]:
        before, after = {"kind": before["kind"]}, {"kind": after["kind"]}
    fixed = before.keys() - _FREE
    changes = describe_changes(_only(before, fixed), _only(after, fixed))
    if changes:
        raise UserError(
            f"{where}: holds another model than the configuration's (there -> here): "
            f"{'; '.join(changes)}; make model the same"
        )
    return describe_changes(_only(before, _FREE), _only(after, _FREE))


def _resolved(config: ModelConfig) -> dict[str, Any]:
    """The configuration with what null stands for."""
    content = config.model_dump(mode="json")
    if not isinstance(config, GruConfig):
        content["d_head"] = config.head_width
    if isinstance(config, RltConfig):
        content["kv_heads"] = config.key_value_heads
    return content


def _only(content: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key in keys}
