"""A SLURM of one machine for tests: munged, slurmctld and slurmd of our own, under a folder.

Nothing of the machine's own SLURM or munge is used or touched: sockets, key, ports and state are
private, so several test runs can each have one.
"""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "sinfo")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
SlurmdPort={port_of_slurmd}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=10
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_for_slurm() -> str | None:
    """Say what a SLURM of our own lacks here; None if it can be started."""
    # Debian keeps the daemons where only root's PATH looks.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if lacking:
        return f"needs SLURM and munge (Debian: slurm-wlm, munge); not found: {', '.join(lacking)}"
    if os.geteuid() != 0:
        return "needs root: slurmd starts jobs as their users"
    return None


class SlurmCluster:
    """The cluster, running between ``__enter__`` and ``__exit__``; its commands' environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for name in ("spool", "state"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                folder=self.folder,
                host=host,
                port=_free_port(),
                port_of_slurmd=_free_port(),
                cpus=os.cpu_count(),
            )
        )
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        try:
            self._start(
                *("munged", "--foreground", "--force", "--num-threads=2"),
                *(f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in files),
            )
            self.wait_for((self.folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self.wait_for(lambda: "idle" in self.try_run("sinfo", "-h", "-o", "%T"), "slurmd")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.try_run("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(timeout=30)

    def run(self, *command: str, **options: str) -> str:
        """Run a command of the cluster; return what it prints on standard output."""
        done = self.start(*command, **options)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def try_run(self, *command: str) -> str:
        """Run a command that may fail; return what it prints."""
        return self.start(*command).stdout

    def start(self, *command: str, **options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment | options,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def states(self, job: str) -> list[str]:
        """Return the state and restarts of each task of a job, such as ``COMPLETED 0``."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return [
            " ".join(re.findall(r"(?:JobState|Restarts)=(\S+)", line)) for line in text.splitlines()
        ]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for some time; fail with the daemons' logs."""
        deadline = time.monotonic() + 100
        while not condition():
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-1000:] for p in self.folder.glob("*.out.log"))
                raise AssertionError(f"{what}: waited in vain; ended: {dead}\n{logs}")
            time.sleep(0.1)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
