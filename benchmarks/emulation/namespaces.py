"""Network namespaces of Linux, by `ip` and `tc`: marked as ours, limited to a rate, removed with what runs in them."""

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
# A waiting process may be late by this much before the wire loses time.
_BURST_SECONDS = 0.002
# So deep that nothing is lost: TCP itself holds each sender back, see `set_packets`.
_QUEUE_BYTES = 4_000_000
_PACKET_SECONDS = 0.0005
# Of current kernels: the most of one connection that waits in the queue.
_OUTPUT_BYTES = 4_194_304
# BBR, the default of some machines, paces by its own guess of the rate; Reno is the one that every namespace may
# choose. Addresses of version 6 would send packets of their own; a kernel without them does not take the setting.
_SETTINGS = """
cd /proc/sys/net && echo reno > ipv4/tcp_congestion_control || exit 1
for file in ipv6/conf/*/disable_ipv6; do echo 1 > $file || true; done 2> /dev/null
"""


def check_machine() -> None:
    """Refuses a machine or a user that cannot make namespaces.

    Raises:
        InputError: a tool is absent, or the user is not root.
    """
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux")):
        if shutil.which(tool) is None:
            raise InputError(f"`{tool}` is not on this machine. Install it with `apt-get install {package}`.")
    if os.geteuid() != 0:
        raise InputError(f"Emulated hosts are made by root only, this is user {os.geteuid()}. Run it as root.")


def run_tool(*command: str) -> str:
    """Returns the output of a command; raises RuntimeError with its message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def in_namespace(name: str, *command: str) -> list[str]:
    """The command line that runs a command in a namespace; it is sent SIGTERM if the process that starts it dies."""
    return ["setpriv", "--pdeathsig", "TERM", "ip", "netns", "exec", name, *command]


def exists(name: str) -> bool:
    """True if there is a namespace of that name."""
    return (_NAMES / name).exists()


def add_namespace(name: str) -> None:
    """Makes a namespace, marked as this process's, with `lo` up, no IPv6 addresses and Reno as its TCP."""
    run_tool("ip", "netns", "add", name)
    run_tool("ip", "-n", name, "link", "set", "lo", "alias", _mark(os.getpid()), "up")
    run_tool("ip", "netns", "exec", name, "sh", "-c", _SETTINGS)


def remove_namespace(name: str) -> None:
    """Kills what runs in a namespace and removes it; nothing happens where it is gone."""
    try:
        kill_processes(name)
        if exists(name):
            run_tool("ip", "netns", "delete", name)
    except RuntimeError:
        # Another start may have removed it meanwhile.
        if exists(name):
            raise


def remove_stale_namespaces() -> None:
    """Removes the namespaces that `add_namespace` made in a process that has died since."""
    for name in sorted(path.name for path in _NAMES.glob("dmt-*")):
        match = _OURS.fullmatch(name)
        if match is None:
            continue
        try:
            lo = run_tool("ip", "-n", name, "link", "show", "lo")
        except RuntimeError:
            # A file that is no namespace, or one that has gone.
            continue
        marks = [line.strip().removeprefix("alias ") for line in lo.splitlines() if " alias " in f" {line.strip()}"]
        if marks and _is_stale(marks[0], int(match[1])):
            remove_namespace(name)


def kill_processes(name: str) -> None:
    """Kills all processes of a namespace; looks again, as one of them may have started another meanwhile.

    Raises:
        RuntimeError: some are left after two seconds.
    """
    for _ in range(100):
        pids = run_tool("ip", "netns", "pids", name).split() if exists(name) else []
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    raise RuntimeError(f"processes {', '.join(pids)} of network namespace {name} do not end")


def limit_interface(namespace: str, interface: str, mbit_per_s: float) -> None:
    """Sets the rate in Mbit/s at which an interface sends."""
    tc, device, bits = ("tc", "-n", namespace), ("dev", interface), round(mbit_per_s * 1e6)
    burst = str(max(2 * MTU, round(bits / 8 * _BURST_SECONDS)))
    shape = ("rate", f"{bits}bit", "burst", burst, "cburst", burst, "quantum", str(2 * MTU))
    run_tool(*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "1")
    run_tool(*tc, "class", "replace", *device, "parent", "1:", "classid", "1:1", "htb", *shape)
    run_tool(*tc, "qdisc", "add", *device, "parent", "1:1", "bfifo", "limit", str(_QUEUE_BYTES))


def set_packets(namespace: str, interface: str, mbit_per_s: float) -> None:
    """Lets every new connection queue half a millisecond of packets at most, so that a small message soon passes.

    By default two packets of 64 kB wait per connection, which a slow wire needs 5 ms for.
    """
    waiting = min(_OUTPUT_BYTES, max(MTU, round(mbit_per_s * 1e6 / 8 * _PACKET_SECONDS)))
    run_tool("ip", "-n", namespace, "link", "set", interface, "gso_max_segs", str(waiting // MTU))
    setting = f"echo {waiting} > /proc/sys/net/ipv4/tcp_limit_output_bytes"
    run_tool("ip", "netns", "exec", namespace, "sh", "-c", setting)


def _mark(pid: int) -> str:
    """Alias of a namespace's `lo`: who made it, and when that process began, as process ids come again."""
    return f"dmt emulated hosts of process {pid} begun {_begun(pid)}"


def _is_stale(mark: str, pid: int) -> bool:
    return mark.startswith(f"dmt emulated hosts of process {pid} begun ") and mark != _mark(pid)


def _begun(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None for one that is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
