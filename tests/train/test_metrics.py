"""The run's numbers on disk outlive a kill at any byte."""

import json
from pathlib import Path

from rlt_dist.train.metrics import MetricsLog
from rlt_dist.util.records import read_records

RECORDS = [
    {"step": step, "loss": 1.5, "state_norm": {"s": 0.1}, "validation": {"loss": 2.0}}
    for step in (1, 2, 3)
]


def test_a_last_line_cut_at_any_byte_loses_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps(record) + "\n" for record in RECORDS)
    whole_before = text.index("\n", text.index("\n") + 1) + 1
    for end in range(whole_before, len(text) + 1):
        path.write_text(text[:end])
        assert read_records(path) in (RECORDS[:2], RECORDS)


def test_going_on_after_a_step_removes_the_later_records(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for record in RECORDS:
        log.write(record)
    log.close()
    log = MetricsLog(tmp_path, 1)
    log.write({"step": 2, "loss": 9.0})
    log.close()
    assert read_records(tmp_path / "metrics.jsonl") == [RECORDS[0], {"step": 2, "loss": 9.0}]


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write(RECORDS[0])
    assert read_records(tmp_path / "metrics.jsonl") == RECORDS[:1]
    log.close()


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "metrics.jsonl") == []
