"""A real SLURM of one node on loopback, for as long as a test lasts.

Debian's packages `slurm-wlm` and `munge`, without systemd and without an accounting database. The
plugin of Snakemake reads the configuration only from its standard place, so it is written there:
only on a machine that has no other, and it is removed afterwards.
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

CONFIGURATION = Path("/etc/slurm/slurm.conf")
MEMORY = 8000  # MB that jobs may ask for together
MUNGE = Path("/run/munge/munge.socket.2")
TEMPLATE = """\
# Written by a test of tacit
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MinJobAge=3600
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Why SLURM cannot be started here; empty if it can."""
    missing = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    if os.geteuid():
        return "its daemons need root"
    if CONFIGURATION.exists() and not CONFIGURATION.read_text().startswith("# Written by a test"):
        return f"there is a {CONFIGURATION} already"
    return ""


@contextmanager
def one_node_slurm(folder):
    """Start munge, the controller and the node; stop all of them, with their jobs, at the end."""
    folder.mkdir()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    CONFIGURATION.parent.mkdir(exist_ok=True)
    cpus = os.cpu_count()
    CONFIGURATION.write_text(TEMPLATE.format(host=host, folder=folder, cpus=cpus, memory=MEMORY))
    with ExitStack() as stack:
        stack.callback(CONFIGURATION.unlink)
        if not MUNGE.exists():
            MUNGE.parent.mkdir(parents=True, exist_ok=True)
            shutil.chown(MUNGE.parent, "munge", "munge")
            stack.enter_context(daemon(["munged", "--foreground"], user="munge"))
        wait_for(MUNGE.exists, "munged")
        stack.enter_context(daemon(["slurmctld", "-D"]))
        stack.enter_context(daemon(["slurmd", "-D", "-N", host]))
        wait_for(lambda: "idle" in run("sinfo", "-h", "-o", "%t"), "the node")
        stack.callback(run, "scancel", "--user", "root")
        yield


@contextmanager
def daemon(command, user=None):
    process = subprocess.Popen(
        command, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout


def wait_for(true, what, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.2)
