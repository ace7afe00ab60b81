"""Stands in for `rlt_dist.jobs.supervise`, so that a job starts no ranks: it says what it is given.

It goes on for as long as a file RUN/jobs/hold is there, and ends with the status in
RUN/jobs/status.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import rlt_dist

WHO = "as submitted"


def main() -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGTERM))
    folder = Path(sys.argv[1])
    told = Path(json.loads((folder / "job.json").read_text())["run_folder"]) / "jobs"
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "none")
    print(
        f"{WHO}, {folder}, code in {rlt_dist.__file__}, from {Path.cwd()}, task {task}", flush=True
    )
    while (told / "hold").exists():
        time.sleep(0.05)
    status = told / "status"
    print("the end", flush=True)
    return int(status.read_text()) if status.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
