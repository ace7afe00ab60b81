"""A real Slurm cluster on this machine: four nodes of eight made-up GPUs, all on 127.0.0.1.

Each node has process numbers of its own: to end its first process is to pull its plug.
"""

import os
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PATIENCE = 30  # seconds
NODES, GPUS = 4, 8
APART = 8000
"""By how much the numbers of processes differ from node to node."""
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
SlurmdTimeout={silence}
MessageTimeout=10
KillWait=3
CompleteWait=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
DefMemPerCPU=256
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=5 State=UP
PartitionName=main Default=YES PriorityTier=1 GraceTime=8
PartitionName=high PriorityTier=10 PreemptMode=OFF
"""
SILENCE = 10
"""Seconds after which a node that does not answer counts as down."""
HARDWARE = f"CoresPerSocket=16 Sockets=1 RealMemory=64000 Gres=gpu:h200:{GPUS}"
NODE = f"NodeName=n{{number}} NodeHostname=localhost NodeAddr=127.0.0.1 Port={{port}} {HARDWARE}\n"
# Taken to be up, since they are never asked: nothing can run there, but sbatch can be asked.
DECLARED = f"NodeName=n[0-511] NodeAddr=127.0.0.1 Port=[1-512] {HARDWARE} State=IDLE\n"
DEVICES = "AutoDetect=off\nName=gpu Type=h200 File={folder}/gpu[0-{last}]\n"


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


def _configure(folder: Path, described: str, controller_port: int) -> Path:
    """Write Slurm's configuration into a new folder, and what it names there."""
    # A socket's path is short, and munged wants no one else to write where its key lies.
    folder.mkdir(mode=0o755)
    for name in ("state", *(f"spool/n{number}" for number in range(NODES))):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "gres.conf").write_text(DEVICES.format(folder=folder, last=GPUS - 1))
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", 0o666 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
    path = folder / "slurm.conf"
    silence = 0 if described is DECLARED else SILENCE
    written = CONFIGURATION.format(controller_port=controller_port, folder=folder, silence=silence)
    path.write_text(written + described)
    return path


@contextmanager
def _controlled(folder: Path, described: str, port: int) -> Iterator[dict[str, str]]:
    """A cluster without its nodes; the environment in which its commands work."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = os.environ | {"SLURM_CONF": str(_configure(folder, described, port))}
        munged = [
            *(DAEMONS["munged"], "--foreground", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
        ]
        stack.enter_context(_daemon(munged, folder / "munged.out.log", environment))
        controller = [DAEMONS["slurmctld"], "-D", "-c"]
        stack.enter_context(_daemon(controller, folder / "slurmctld.out.log", environment))
        yield environment


@contextmanager
def _daemon(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    process = _start(command, log, environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=PATIENCE)


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@dataclass
class Nodes:
    """The nodes n0 to n3, which can lose their power and get it back."""

    folder: Path
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def kill(self, name: str) -> None:
        """End a node and all that runs on it at once, without a word to Slurm."""
        process = self.running.pop(name)
        process.kill()  # unshare takes all that runs on its node with it
        process.wait(timeout=PATIENCE)

    def revive(self, *names: str) -> None:
        """Switch nodes on, and wait until Slurm may use them."""
        for name in names:
            # torchrun knows an agent by its host's name, here one for all, and its process number.
            apart = f"echo {APART * int(name[1:])} > /proc/sys/kernel/ns_last_pid"
            # slurmd must not be its node's first process, which would have to reap the others.
            node = ["bash", "-c", f"{apart}; {DAEMONS['slurmd']} -D -N {name} & wait"]
            alone = ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc"]
            log = self.folder / f"{name}.out.log"
            self.running[name] = _start([*alone, *node], log, self.environment)
        deadline = time.monotonic() + PATIENCE
        while not set(names) <= self._ready():
            if time.monotonic() > deadline:
                logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
                pytest.fail(f"{names} do not come up:\n" + "\n".join(logs))
            time.sleep(0.1)

    def _ready(self) -> set[str]:
        command = ["sinfo", "--noheader", "--Node", "--states=idle,mixed", "--format=%N %t"]
        shown = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        # A star marks a node that does not answer.
        return {line.split()[0] for line in shown.stdout.splitlines() if not line.endswith("*")}

    def end(self) -> None:
        for name in list(self.running):
            self.kill(name)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """The machines of the cluster."""
    if reason := _why_not():
        pytest.skip(reason)
    controller, *ports = _free_ports(1 + NODES)
    described = "".join(NODE.format(number=number, port=port) for number, port in enumerate(ports))
    folder = Path("/tmp") / f"slurm-{os.getpid()}"
    with _controlled(folder, described, controller) as environment:
        nodes = Nodes(folder, environment)
        try:
            nodes.revive(*(f"n{number}" for number in range(NODES)))
            yield nodes
        finally:
            nodes.end()


@pytest.fixture(scope="session")
def cluster(nodes: Nodes) -> dict[str, str]:
    """The environment in which sbatch, srun and squeue speak to the cluster.

    The partition `high` preempts jobs of `main`, which is the default: they get SIGUSR1 at once and
    are requeued 8 seconds later.
    """
    return nodes.environment


@pytest.fixture(scope="session")
def template(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job script, with a site's own line: every node here is this machine."""
    ours = (repository / "slurm" / "train.sbatch").read_text()
    before, after = ours.split("\nfolder=", 1)  # where a site's own lines go
    file = tmp_path_factory.mktemp("site") / "train.sbatch"
    file.write_text(f"{before}\nexport MASTER_ADDR=127.0.0.1\nfolder={after}")
    return file


@pytest.fixture(scope="session")
def wide_cluster() -> Iterator[dict[str, str]]:
    """The same for 512 nodes that are only said to be there: sbatch --test-only can be asked."""
    if reason := _why_not():
        pytest.skip(reason)
    (port,) = _free_ports(1)
    with _controlled(Path("/tmp") / f"slurm-wide-{os.getpid()}", DECLARED, port) as environment:
        deadline = time.monotonic() + PATIENCE
        while subprocess.run(["scontrol", "ping"], env=environment, check=False).returncode != 0:
            assert time.monotonic() < deadline, "the controller does not come up"
            time.sleep(0.1)
        yield environment
