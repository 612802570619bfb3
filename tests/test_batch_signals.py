"""The first signal asks the run to stop, in every thread and child; the second ends it at once."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, Protocol

import pytest

from bioptimus.batch.signals import StopFlag

# A run: a worker thread that ends its piece of work when told, a main thread that waits in steps.
RUN = """
import signal, sys, threading, time
from bioptimus.batch.signals import StopFlag
stubborn = len(sys.argv) > 1
def work():
    while stubborn or not flag.stopped:
        time.sleep(0.01)
    print("worker landed", flush=True)
with StopFlag() as flag:
    worker = threading.Thread(target=work)
    worker.start()
    print("ready", flush=True)
    try:
        flag.wait(60)
        print("main stops", flush=True)
        while worker.is_alive():
            # In steps, as a run does: of signals that come close together the kernel gives
            # later ones to another thread, and a join without an end would not be woken.
            worker.join(0.05)
    finally:
        print("cleaned up", flush=True)
sys.exit(flag.exit_code)
"""

# A run with two child processes, each a run of its own.
PARENT = """
import subprocess, sys
from bioptimus.batch.signals import StopFlag
with StopFlag() as flag:
    children = [
        flag.start_child([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\\n"
    print("ready", *(child.pid for child in children), flush=True)
    flag.wait(60)
    print("told", flush=True)
    print(*(child.wait() for child in children), flush=True)
sys.exit(flag.exit_code)
"""


class Start(Protocol):
    def __call__(self, code: str, *arguments: str) -> subprocess.Popen[str]: ...


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python program in a process group of its own; what still runs is killed."""
    with contextlib.ExitStack() as started:

        def start(code: str, *arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def output_of(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_first_signal_lets_threads_land_and_gives_the_exit_code(
    start: Start, number: signal.Signals, code: int
) -> None:
    run = start(RUN)
    assert output_of(run).readline() == "ready\n"
    run.send_signal(number)
    out, err = run.communicate(timeout=30)
    assert set(out.splitlines()) == {"main stops", "worker landed", "cleaned up"}
    assert (run.returncode, err) == (code, "")


def test_second_signal_ends_a_process_whose_worker_hangs(start: Start) -> None:
    run = start(RUN, "stubborn")
    assert output_of(run).readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    assert output_of(run).readline() == "main stops\n"
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, out, err) == (143, "", "")


def test_one_signal_told_twice_as_by_timeout_lets_threads_land(start: Start) -> None:
    run = start(RUN.replace("flag.wait(60)", "[signal.raise_signal(15) for _ in range(2)]"))
    out, err = run.communicate(timeout=30)
    assert set(out.splitlines()) == {"ready", "main stops", "worker landed", "cleaned up"}
    assert (run.returncode, err) == (143, "")


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_end_of_the_terminal_told_behind_another_signal_lets_threads_land(
    start: Start, first: signal.Signals
) -> None:
    run = start(RUN, "stubborn")
    assert output_of(run).readline() == "ready\n"
    run.send_signal(first)
    assert output_of(run).readline() == "main stops\n"
    for _ in range(2):
        run.send_signal(signal.SIGHUP)
    # Not ended by those: it hears one more signal, and that is the second one.
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert run.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_children_get_the_signal_once_also_from_a_terminal(
    start: Start, number: signal.Signals
) -> None:
    parent = start(PARENT, RUN)
    assert output_of(parent).readline().startswith("ready ")
    # What a terminal does on Ctrl-C: the whole foreground group gets it. Were it passed on as
    # well, the children would take it for the second signal and land nothing.
    subprocess.run(["kill", f"-{number.value}", "--", f"-{parent.pid}"], check=True)
    out, err = parent.communicate(timeout=30)
    code = 128 + number
    assert out.splitlines() == ["told", f"{code} {code}"]
    assert (parent.returncode, err) == (code, "")


def test_second_signal_ends_children_too(start: Start) -> None:
    parent = start(PARENT, RUN, "stubborn")
    assert output_of(parent).readline().startswith("ready ")
    parent.send_signal(signal.SIGINT)
    assert output_of(parent).readline() == "told\n"
    parent.send_signal(signal.SIGTERM)
    # The children hold the error stream too: it ends when the last of them does.
    out, err = parent.communicate(timeout=30)
    assert (parent.returncode, out, err) == (143, "", "")


def test_ignored_interrupt_stays_ignored_as_under_nohup(start: Start) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + RUN
    run = start(code)
    assert output_of(run).readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=30)
    assert run.returncode == 143


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with StopFlag() as flag:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        assert not flag.wait(0.0)
        assert flag.exit_code is None
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_signal_while_the_main_thread_waits_is_seen_by_the_wait() -> None:
    with StopFlag() as flag:
        timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGTERM])
        timer.start()
        assert flag.wait(30)
        timer.join()
        assert flag.stopped
        assert flag.exit_code == 143
