"""Four ranks killed at any moment: ten kills of the campaign, each kind among them."""

import os
import re
import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).with_name("campaign.py")


def test_ten_kills_of_four_ranks_change_nothing_and_leave_nothing(tmp_path: Path) -> None:
    output = tmp_path / "faults.txt"
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--kills", "10", "--output", str(output)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    text = output.read_text()
    assert "0 faults in 10 kills of runs of 4 ranks" in text
    kinds = re.findall(r"^\w+ +\dx\dx\d +(.*?)  +kills ", text, re.MULTILINE)
    assert len(set(kinds)) == 9
