"""Runs a command in a Slurm cluster on this machine: `tools/slurm.py COMMAND ...`. `make test-slurm` runs tests.

The cluster is real: munged, slurmctld, and a slurmd on each of two nodes, which are namespaces of this machine
(tests/_worlds/hosts.py). The command runs on a third host, from which it submits jobs. It needs root, and Debian or a
system that is made of it: missing packages are installed. Files, ports and keys are the cluster's own, in a temporary
directory, and nothing is left when the command has ended. Its exit status is that of this program; if there can be no
cluster, the command does not run, the reason is printed, and the status is 0.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests._worlds.hosts import Hosts, NoHosts  # noqa: E402

PACKAGES = ("slurm-wlm", "munge", "libpmix-dev")  # the last has the libpmix.so of --mpi=pmix
LOGIN, NODES = "login", ("node1", "node2")
START_SECONDS = 60.0
CONFIGURATION = """\
ClusterName=torchmn
SlurmctldHost={login}({login_address})
SlurmUser=root
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
StateSaveLocation={directory}/state
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
SlurmdSpoolDir={directory}/spool.%n
AuthType=auth/munge
CredType=cred/munge
# A job that is put back into the queue starts after cred_expire seconds; the default is 120.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
MpiDefault=none
# No cgroups, which containers seldom have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Nodes have the CPUs that are written here.
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
KillWait=30
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeAddr={node_addresses} CPUs=4 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class NoSlurm(Exception):
    """There can be no cluster here; the message is the reason."""


@contextmanager
def cluster() -> Iterator[tuple[list[str], Path]]:
    """Starts a cluster, and stops it at the end.

    Yields:
        The start of a command line that runs the rest on the host from which jobs are submitted, and the directory
        with `slurm.conf` and the logs.

    Raises:
        NoSlurm: it cannot be started.
    """
    install()
    with ExitStack() as started:
        try:
            hosts = started.enter_context(Hosts(dict.fromkeys((LOGIN, *NODES), 4)))
        except NoHosts as error:
            raise NoSlurm(str(error)) from error
        directory = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="torchmn-slurm-")))
        directory.chmod(0o755)
        write_configuration(directory, hosts)
        socket = f"{directory}/munge.socket"
        files = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        started.enter_context(daemon(["munged", "--foreground", "--force", f"--socket={socket}", *files], {}))
        environment = {"SLURM_CONF": f"{directory}/slurm.conf"}
        login = hosts.enter(LOGIN)
        started.enter_context(daemon([*login, "slurmctld", "-D"], environment))
        for node in NODES:
            own = {"SLURM_CONF": f"{directory}/{node}/slurm.conf"}
            started.enter_context(daemon([*hosts.enter(node), "slurmd", "-D", "-N", node], own))
        wait_for_nodes(login, directory, environment)
        started.callback(
            subprocess.run, [*login, "scancel", "--signal=KILL", "--user=root"], env=os.environ | environment
        )
        yield login, directory


def install() -> None:
    """Installs Slurm if it is missing; raises NoSlurm if that does not work."""
    if os.geteuid() != 0:
        raise NoSlurm("Slurm's daemons need root")
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "srun", "munged")):
        return
    if not shutil.which("apt-get"):
        raise NoSlurm("Slurm is not installed, and there is no apt-get")
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "--quiet", "--option=DPkg::Lock::Timeout=300", *words]
        done = subprocess.run(command, env=quiet, capture_output=True, text=True)
        if done.returncode:
            raise NoSlurm(f"apt-get {words[0]} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def write_configuration(directory: Path, hosts: Hosts) -> None:
    """Writes the key of munge, and slurm.conf."""
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (directory / "state").mkdir()
    for node in NODES:  # nodes share /tmp, where Slurm's PMIx would create the same files for each
        (directory / node / "pmix").mkdir(parents=True)
        (directory / node / "slurm.conf").symlink_to("../slurm.conf")
        (directory / node / "mpi.conf").write_text(f"PMIxCliTmpDirBase={directory}/{node}/pmix\n")
    (directory / "slurm.conf").write_text(
        CONFIGURATION.format(
            directory=directory,
            login=LOGIN,
            login_address=hosts.addresses[LOGIN],
            nodes=",".join(NODES),
            node_addresses=",".join(hosts.addresses[node] for node in NODES),
        )
    )


@contextmanager
def daemon(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Runs a daemon, and ends it and what it started."""
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_nodes(login: list[str], directory: Path, environment: dict[str, str]) -> None:
    """Waits until all nodes are idle; raises NoSlurm with the end of the logs if they are not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        shown = subprocess.run(
            [*login, "sinfo", "--noheader", "--partition=normal", "--Node", "--format=%t"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        if shown.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    logs = [f"{path.name}: {line}" for path in directory.glob("*.log") for line in path.read_text().splitlines()[-3:]]
    raise NoSlurm(f"the nodes were not idle after {START_SECONDS:g} s\n" + "\n".join(logs))


def main() -> int:
    """Runs the command of the command line; returns the exit status."""
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    try:
        with cluster() as (login, directory):
            environment = os.environ | {"SLURM_CONF": f"{directory}/slurm.conf", "TORCHMN_TEST_SLURM": "1"}
            return subprocess.run([*login, f"--wd={os.getcwd()}", *sys.argv[1:]], env=environment).returncode
    except NoSlurm as error:
        print(f"skipped, because there can be no Slurm here: {error}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
