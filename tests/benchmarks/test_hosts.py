"""Emulated hosts: counters, refusals and agents anywhere; the rate and the clean-up where namespaces can be made."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.emulation import hosts as module
from benchmarks.emulation import namespaces
from benchmarks.emulation.agents import run_agents
from benchmarks.emulation.hosts import UPLINK, EmulatedHosts, sent_bytes
from dmt.errors import InputError
from tests.ranks import wait_until

ROOT = Path(__file__).parent.parent.parent
NETNS = Path("/run/netns")


def _can_make_hosts() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "setpriv"))):
        return False
    name = f"dmt-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made


needs_root = pytest.mark.skipif(not _can_make_hosts(), reason="needs Linux, root, iproute2 and network namespaces")


def ours(pid: int) -> list[str]:
    return sorted(path.name for path in NETNS.glob(f"dmt-{pid}-*"))


def inside(hosts: EmulatedHosts, host: int, code: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", hosts.namespace(host), sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def rates(hosts: EmulatedHosts) -> list[str]:
    """The rate at which the kernel lets each of two hosts send; hosts without a limit are left out."""
    show = ["class", "show", "dev", UPLINK]
    shown = [subprocess.check_output(["tc", "-n", hosts.namespace(host), *show], text=True) for host in (0, 1)]
    return [rate for text in shown for rate in re.findall(r" rate (\S+)", text)]


TABLE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo:   11       1    0    0    0     0          0         0       12       1    0    0    0     0       0
   up0:1300000     9    0    0    0     0          0         0 98765432      8    0    0    0     0       0
"""


def test_bytes_sent_are_read_from_the_kernels_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Path, "read_text", lambda path: TABLE)
    assert sent_bytes("up0") == 98765432
    assert sent_bytes("lo") == 12
    with pytest.raises(InputError, match=r"interface='eth9' is not in /proc/net/dev, which has lo, up0\. Name one"):
        sent_bytes("eth9")


@pytest.mark.parametrize(
    ("num_hosts", "rate", "message"),
    [
        (0, None, r"num_hosts=0 must be from 1 to 64"),
        (65, None, r"num_hosts=65 must be from 1 to 64"),
        (2, 0.0, r"mbit_per_s=0.0 must be from 1 to 1,000,000, or None"),
        (2, float("nan"), r"mbit_per_s=nan must be from 1"),
    ],
)
def test_values_out_of_range_are_refused(num_hosts: int, rate: float | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EmulatedHosts(num_hosts, mbit_per_s=rate)


@pytest.mark.parametrize(("tool", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux")])
def test_absent_tools_and_other_users_are_refused(monkeypatch: pytest.MonkeyPatch, tool: str, package: str) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == tool else f"/sbin/{name}")
    with pytest.raises(InputError, match=f"`{tool}` is not installed.*apt-get install {package}"):
        EmulatedHosts(2, mbit_per_s=None)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match=r"need root, but this is user 1000\. Run the command as root"):
        EmulatedHosts(2, mbit_per_s=None)


def test_a_mark_is_stale_once_its_process_is_dead_or_another() -> None:
    me = os.getpid()
    mark = namespaces._mark(me)
    assert not namespaces._is_stale(mark, me)
    assert namespaces._is_stale(re.sub(r"\d+$", "1", mark), me), "the id came again"
    assert not namespaces._is_stale("somebody's", me)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = namespaces._mark(child.pid)
    assert not namespaces._is_stale(theirs, child.pid)
    child.kill()
    assert wait_until(lambda: namespaces._is_stale(theirs, child.pid))
    child.communicate()
    assert namespaces._is_stale(theirs, child.pid)


def agent(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_failing_agent_ends_the_others_and_shows_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed on host 1 \(exit code 3\).*Last lines of host 1:\nno luck"):
        run_agents(
            # Longer than a test may take: the first agent is not waited for.
            [agent("import time; time.sleep(3600)"), agent("print('no luck', flush=True); raise SystemExit(3)")],
            timeout=3600,
            env=dict(os.environ),
        )


def test_a_hanging_agent_is_killed_at_the_timeout(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    # A shell: on a busy machine, an interpreter may not have begun after two seconds.
    asleep = ["sh", "-c", f"echo $$ > {note}; echo asleep; exec sleep 60"]
    with pytest.raises(TimeoutError, match=r"(?s)Host 1 is still running after 2 s.*host 1:\nasleep"):
        run_agents([["true"], asleep], timeout=2, env=dict(os.environ))
    assert not Path("/proc", note.read_text().strip()).exists()


RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.sendall(b".")
    connection.close()
"""

SEND = """
import socket, sys, time
def transfer(size):
    connection = socket.create_connection((sys.argv[1], 7000))
    begin = time.perf_counter()
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    return time.perf_counter() - begin
for line in sys.stdin:
    print(transfer(int(line)), flush=True)
"""


@needs_root
def test_a_rate_is_held_and_bytes_are_counted() -> None:
    before = {path.name for path in Path("/sys/class/net").iterdir()}
    with EmulatedHosts(2, mbit_per_s=80) as hosts, contextlib.ExitStack() as stack:
        receiver = stack.enter_context(inside(hosts, 1, RECEIVE, hosts.address(1)))
        assert receiver.stdout.readline() == "ready\n"
        sender = stack.enter_context(inside(hosts, 0, SEND, hosts.address(1)))
        stack.callback(receiver.kill)
        stack.callback(sender.kill)

        def seconds(size: int) -> float:
            sender.stdin.write(f"{size}\n")
            sender.stdin.flush()
            return float(sender.stdout.readline())

        counted = hosts.uplink_bytes()
        # 5 MB at 80 Mbit/s. Never faster than the wire, but for the burst. How much slower depends on the machine:
        # `benchmarks.emulation.wire` measures it.
        assert rates(hosts) == ["80Mbit"] * 2
        assert min(seconds(5_000_000) for _ in range(3)) > 0.49
        sent, acknowledged = (now - then for now, then in zip(hosts.uplink_bytes(), counted, strict=True))
        assert 15_000_000 < sent < 15_000_000 * 1.02
        assert 0 < acknowledged < 15_000_000 * 0.02
        assert {path.name for path in Path("/sys/class/net").iterdir()} == before, "the machine's own network changed"
    assert ours(os.getpid()) == []


@needs_root
def test_an_exception_leaves_nothing_behind() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), EmulatedHosts(2, mbit_per_s=None) as hosts:  # noqa: PT012
        assert len(ours(os.getpid())) == 3
        sleeper = inside(hosts, 1, "input()")
        assert wait_until(lambda: subprocess.check_output(["ip", "netns", "pids", hosts.namespace(1)]).strip())
        raise ZeroDivisionError
    assert ours(os.getpid()) == []
    assert sleeper.wait(60) == -signal.SIGKILL
    sleeper.communicate()
    assert signal.getsignal(signal.SIGTERM) is handler


MAKER = """
import signal
import subprocess
from benchmarks.emulation.hosts import EmulatedHosts
# A shell's background jobs, and all they start, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
with EmulatedHosts(1, mbit_per_s=100) as hosts:
    sleep = ["ip", "netns", "exec", hosts.namespace(0), "sleep", "60"]
    child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    child.wait()
"""


@needs_root
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_nothing_behind_or_the_next_start_removes_it(how: signal.Signals) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    child = Path("/proc", maker.stdout.readline().strip())
    assert ours(maker.pid) == [f"dmt-{maker.pid}-h0", f"dmt-{maker.pid}-switch"]
    with EmulatedHosts(1, mbit_per_s=None):
        assert len(ours(maker.pid)) == 2, "hosts of a living process are left alone"
    maker.send_signal(how)
    with maker.stdout:
        maker.wait(60)
    if how == signal.SIGKILL:
        assert len(ours(maker.pid)) == 2
        with EmulatedHosts(1, mbit_per_s=None):
            pass
    elif how == signal.SIGTERM:
        assert maker.returncode == 128 + signal.SIGTERM
    assert ours(maker.pid) == []
    assert wait_until(lambda: not child.exists() or " Z " in (child / "stat").read_text())


@needs_root
@pytest.mark.parametrize("part", ["switch", "h1"])
def test_a_namespace_of_somebody_else_is_neither_used_nor_removed(part: str) -> None:
    name = f"dmt-{os.getpid()}-{part}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with pytest.raises(InputError, match=rf"Network namespace {name} exists already\. .* `ip netns delete {name}`"):
            EmulatedHosts(2, mbit_per_s=None)
        assert ours(os.getpid()) == [name]
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
