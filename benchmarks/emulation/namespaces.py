"""Makes network namespaces by `ip` and `tc`, marks them, limits their rates, and removes them and their processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from dmt.errors import InputError

__all__ = [
    "MTU",
    "add_namespace",
    "check_machine",
    "exists",
    "in_namespace",
    "kill_processes",
    "limit_interface",
    "remove_namespace",
    "remove_stale_namespaces",
    "run_tool",
    "set_packets",
]

MTU = 9000
"""Largest packet in bytes, as in data centers: headers are 0.7 % of it, and 4.6 % of 1,500 bytes."""

_NAMES = Path("/run/netns")
_OURS = re.compile(r"dmt-(\d+)-(?:switch|h\d+)")
# A process may be late by this much before the link stands idle.
_BURST_SECONDS = 0.002
# Long enough that no packet is lost: TCP itself limits each sender, see `set_packets`.
_QUEUE_BYTES = 4_000_000
_PACKET_SECONDS = 0.0005
# Default of current kernels: the most bytes of a connection that wait in the queue.
_OUTPUT_BYTES = 4_194_304
# BBR, the default of some machines, estimates the rate and paces by it; Reno is available in every namespace. IPv6
# addresses would cause further packets; a kernel without IPv6 has no such setting.
_SETTINGS = """
cd /proc/sys/net && echo reno > ipv4/tcp_congestion_control || exit 1
for file in ipv6/conf/*/disable_ipv6; do echo 1 > $file || true; done 2> /dev/null
"""


def check_machine() -> None:
    """Checks that this machine and user can make namespaces.

    Raises:
        InputError: a tool is absent, or the user is not root.
    """
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux")):
        if shutil.which(tool) is None:
            raise InputError(f"`{tool}` is not installed. Install it with `apt-get install {package}`.")
    if os.geteuid() != 0:
        raise InputError(f"Emulated hosts need root, but this is user {os.geteuid()}. Run the command as root.")


def run_tool(*command: str) -> str:
    """Runs a command and returns its output; raises `RuntimeError` with its message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def in_namespace(name: str, *command: str) -> list[str]:
    """Returns the command line that runs a command in a namespace; if its parent dies, it gets SIGTERM."""
    return ["setpriv", "--pdeathsig", "TERM", "ip", "netns", "exec", name, *command]


def exists(name: str) -> bool:
    """Returns whether there is a namespace of this name."""
    return (_NAMES / name).exists()


def add_namespace(name: str) -> None:
    """Makes a namespace that is marked as this process's, with `lo` up, no IPv6, and TCP Reno."""
    run_tool("ip", "netns", "add", name)
    run_tool("ip", "-n", name, "link", "set", "lo", "alias", _mark(os.getpid()), "up")
    run_tool("ip", "netns", "exec", name, "sh", "-c", _SETTINGS)


def remove_namespace(name: str) -> None:
    """Kills the processes in a namespace and removes it; does nothing if there is no such namespace."""
    try:
        kill_processes(name)
        if exists(name):
            run_tool("ip", "netns", "delete", name)
    except RuntimeError:
        # Another run may have removed it meanwhile.
        if exists(name):
            raise


def remove_stale_namespaces() -> None:
    """Removes namespaces that `add_namespace` made in processes that no longer exist."""
    for name in sorted(path.name for path in _NAMES.glob("dmt-*")):
        match = _OURS.fullmatch(name)
        if match is None:
            continue
        try:
            lo = run_tool("ip", "-n", name, "link", "show", "lo")
        except RuntimeError:
            # Not a namespace, or already removed.
            continue
        marks = [line.strip().removeprefix("alias ") for line in lo.splitlines() if " alias " in f" {line.strip()}"]
        if marks and _is_stale(marks[0], int(match[1])):
            remove_namespace(name)


def kill_processes(name: str) -> None:
    """Kills all processes in a namespace, repeatedly, since one of them may start another meanwhile.

    Raises:
        RuntimeError: some are still running after two seconds.
    """
    for _ in range(100):
        pids = run_tool("ip", "netns", "pids", name).split() if exists(name) else []
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    raise RuntimeError(f"Processes {', '.join(pids)} in network namespace {name} are still running. Kill them by hand.")


def limit_interface(namespace: str, interface: str, mbit_per_s: float) -> None:
    """Limits the rate at which an interface sends, in Mbit/s."""
    tc, device, bits = ("tc", "-n", namespace), ("dev", interface), round(mbit_per_s * 1e6)
    burst = str(max(2 * MTU, round(bits / 8 * _BURST_SECONDS)))
    shape = ("rate", f"{bits}bit", "burst", burst, "cburst", burst, "quantum", str(2 * MTU))
    run_tool(*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "1")
    run_tool(*tc, "class", "replace", *device, "parent", "1:", "classid", "1:1", "htb", *shape)
    run_tool(*tc, "qdisc", "add", *device, "parent", "1:1", "bfifo", "limit", str(_QUEUE_BYTES))


def set_packets(namespace: str, interface: str, mbit_per_s: float) -> None:
    """Limits the queue of every new connection to half a millisecond, or one packet, so that small messages wait less.

    By default two packets of 64 kB wait per connection, for which a link of 200 Mbit/s takes 5 ms.
    """
    waiting = min(_OUTPUT_BYTES, max(MTU, round(mbit_per_s * 1e6 / 8 * _PACKET_SECONDS)))
    run_tool("ip", "-n", namespace, "link", "set", interface, "gso_max_segs", str(waiting // MTU))
    setting = f"echo {waiting} > /proc/sys/net/ipv4/tcp_limit_output_bytes"
    run_tool("ip", "netns", "exec", namespace, "sh", "-c", setting)


def _mark(pid: int) -> str:
    """Returns the alias of a namespace's `lo`: its maker's process id, and start time, since ids are reused."""
    return f"dmt emulated hosts of process {pid} begun {_begun(pid)}"


def _is_stale(mark: str, pid: int) -> bool:
    return mark.startswith(f"dmt emulated hosts of process {pid} begun ") and mark != _mark(pid)


def _begun(pid: int) -> str | None:
    """Returns the start time of a process in clock ticks since the machine started; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
