"""A real Slurm cluster on this machine: two nodes, everything on 127.0.0.1, without systemd."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PATIENCE = 30  # seconds
NODES = 2
DAEMONS = {name: f"/usr/sbin/{name}" for name in ("munged", "slurmctld", "slurmd")}

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
CompleteWait=0
DefMemPerCPU=256
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=5 State=UP
"""
NODE = (
    "NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
    "Sockets=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=64000 State=UNKNOWN\n"
)


def _why_not() -> str | None:
    """Why no cluster can be started here."""
    missing = [name for name, path in DAEMONS.items() if not os.access(path, os.X_OK)]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "only root can start a Slurm cluster"
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc", "true"]
    if subprocess.run(alone, capture_output=True, timeout=PATIENCE, check=False).returncode != 0:
        return "nodes cannot have process numbers of their own here"
    return None


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _configure(folder: Path) -> Path:
    for name in ("state", *(f"spool/n{number}" for number in range(NODES))):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    controller, *ports = _free_ports(1 + NODES)
    text = CONFIGURATION.format(controller_port=controller, folder=folder)
    text += "".join(NODE.format(number=number, port=port) for number, port in enumerate(ports))
    path = folder / "slurm.conf"
    path.write_text(text)
    return path


@contextmanager
def _daemon(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    finally:
        # unshare takes all that runs on its node with it.
        process.send_signal(signal.SIGKILL if command[0] == "unshare" else signal.SIGTERM)
        try:
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=PATIENCE)


def _wait_for_nodes(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    while True:
        shown = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if len(set(shown.stdout.split())) == NODES:
            return
        if time.monotonic() > deadline:
            logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
            pytest.fail("the cluster does not come up:\n" + "\n".join(logs))
        time.sleep(0.1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which sbatch, srun and squeue speak to a cluster of two nodes."""
    if reason := _why_not():
        pytest.skip(reason)
    # A socket's path is short, and munged wants no one else to write where its key lies.
    folder = Path("/tmp") / f"slurm-{os.getpid()}"
    folder.mkdir(mode=0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = os.environ | {"SLURM_CONF": str(_configure(folder))}
        munged = [
            *(DAEMONS["munged"], "--foreground", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
        ]
        stack.enter_context(_daemon(munged, folder / "munged.out.log", environment))
        controller = [DAEMONS["slurmctld"], "-D", "-c"]
        stack.enter_context(_daemon(controller, folder / "slurmctld.out.log", environment))
        for number in range(NODES):
            # slurmd must not be its node's first process, which would have to reap the others.
            node = ["bash", "-c", f"{DAEMONS['slurmd']} -D -N n{number} & wait"]
            alone = ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc"]
            log = folder / f"n{number}.out.log"
            stack.enter_context(_daemon([*alone, *node], log, environment))
        _wait_for_nodes(environment, folder)
        yield environment
