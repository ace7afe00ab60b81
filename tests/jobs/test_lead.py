"""How long before its end a job is warned."""

import json
from pathlib import Path

from rlt_dist.jobs.lead import UNMEASURED, lead_of


def test_the_lead_is_the_longest_step_and_the_slowest_saves(tmp_path: Path) -> None:
    saves = {2: 7.0, 4: 9.5}
    records = [
        {"step": step, "seconds": 3.0 + step}
        | ({"checkpoint": {"step": step, "seconds": saves[step]}} if step in saves else {})
        for step in range(1, 6)
    ]
    assert lead_of(tmp_path) == UNMEASURED
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(records[0]) + "\n")
    assert lead_of(tmp_path) == UNMEASURED
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert lead_of(tmp_path) >= 8.0 + 2 * 9.5
