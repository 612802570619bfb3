"""A slide is never in the hands of two processes, and never stays in those of a dead one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from bioptimus.batch import claims
from bioptimus.batch.claims import Claim, claim_path, last_beat, read_holder
from bioptimus.errors import OutputError

LONG_AGO_S = 10_000.0

# Claims every result in an order of its own; being in a result twice at once, or writing it
# twice, is an error. Prints the ones it did.
WORKER = """
import os, random, sys
from pathlib import Path
from bioptimus.batch.claims import Claim
folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
outputs = [folder / "model" / f"{n}.h5" for n in range(count)]
random.Random(seed).shuffle(outputs)
for _ in range(3):
    for output in outputs:
        claim = Claim.take(output)
        if claim is None:
            continue
        with claim:
            inside = output.with_suffix(".inside")
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            if not output.exists():
                os.close(os.open(output, os.O_CREAT | os.O_EXCL))
                print(output.name)
            inside.unlink()
"""

# Takes a claim and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from bioptimus.batch.claims import Claim
claim = Claim.take(Path(sys.argv[1]))
print(claim is not None, flush=True)
sys.stdin.read()
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_holder(output: Path) -> subprocess.Popen[str]:
    holder = start(HOLDER, output)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    return holder


def run_workers(folder: Path, *, slides: int, seeds: Iterable[int]) -> list[str]:
    workers = [start(WORKER, folder, seed, slides) for seed in seeds]
    done: list[str] = []
    for worker in workers:
        out, err = worker.communicate(timeout=60)
        assert (worker.returncode, err) == (0, "")
        done += out.split()
    return done


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def foreign_claim(output: Path, **changes: object) -> Path:
    """Leave a claim as another machine would."""
    values = {
        "token": "0123456789abcdef0123456789abcdef",
        "host": "elsewhere",
        "pid": os.getpid(),
        "job": "4711_3",
        "since": time.time(),
        "heartbeat_s": 30.0,
        "machine": "another boot",
        "started": 1,
    }
    path = claim_path(output)
    path.write_text(json.dumps(values | changes))
    return path


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_eight_processes_do_each_of_forty_slides_once(tmp_path: Path) -> None:
    done = run_workers(tmp_path, slides=40, seeds=range(8))
    assert sorted(done) == sorted(f"{n}.h5" for n in range(40))
    assert not list(tmp_path.rglob("*claim*"))


def test_claims_of_a_killed_process_are_taken_over_by_exactly_one(tmp_path: Path) -> None:
    outputs = [tmp_path / "model" / f"{n}.h5" for n in range(4)]
    holders = [start_holder(output) for output in outputs]
    for holder in holders:
        kill(holder)
    assert len(list(tmp_path.rglob("*.claim"))) == 4
    # Every claim that a dead process can leave, on every slide: all workers meet all of them.
    text = claim_path(outputs[0]).read_text()
    for number in range(4, 60):
        claim_path(tmp_path / "model" / f"{number}.h5").write_text(
            text.replace(json.loads(text)["token"], f"{number:032x}")
        )
    done = run_workers(tmp_path, slides=60, seeds=[0] * 8)  # in one order: they all compete
    assert sorted(done) == sorted(f"{n}.h5" for n in range(60))
    assert not list(tmp_path.rglob("*claim*"))


def test_living_process_keeps_its_claim(tmp_path: Path) -> None:
    output = tmp_path / "x.h5"
    holder = start_holder(output)
    try:
        assert Claim.take(output) is None
        seen = read_holder(output)
        assert seen is not None
        assert seen.pid == holder.pid
        assert f"process {holder.pid} on " in str(seen)
    finally:
        kill(holder)


def test_claim_says_who_holds_it_and_is_gone_after_the_with_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "8")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    output = tmp_path / "new" / "folder" / "x.h5"
    claim = Claim.take(output)
    assert claim is not None
    seen = read_holder(output)
    assert seen is not None
    assert (seen.pid, seen.job) == (os.getpid(), "8_2")
    assert Claim.take(output) is None
    with pytest.raises(ZeroDivisionError), claim:
        raise ZeroDivisionError
    assert read_holder(output) is None
    assert list(output.parent.iterdir()) == []
    claim.release()


def test_claim_from_another_machine_counts_until_its_heartbeats_stop(tmp_path: Path) -> None:
    output = tmp_path / "x.h5"
    path = foreign_claim(output)
    assert Claim.take(output) is None
    age(path, 30.0 * claims.MISSED_HEARTBEATS - 20)
    assert Claim.take(output) is None
    age(path, 40)
    claim = Claim.take(output)
    assert claim is not None
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_holders_own_interval_decides_when_it_is_stale(tmp_path: Path) -> None:
    output = tmp_path / "x.h5"
    age(foreign_claim(output, heartbeat_s=3600.0), 7200)
    assert Claim.take(output, heartbeat_s=1.0) is None


def test_wrong_clock_of_this_machine_makes_no_claim_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.h5"
    foreign_claim(output)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert Claim.take(output) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": "../../x"}', "null"])
def test_damaged_claim_counts_by_its_age(tmp_path: Path, text: str) -> None:
    output = tmp_path / "x.h5"
    claim_path(output).write_text(text)
    assert Claim.take(output) is None
    assert read_holder(output) is None
    age(claim_path(output), LONG_AGO_S)
    claim = Claim.take(output)
    assert claim is not None
    claim.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"token": "../../x"}, {"heartbeat_s": 0}, {"pid": "1"}])
def test_claim_of_values_that_nobody_writes_counts_by_its_age(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    output = tmp_path / "x.h5"
    path = foreign_claim(output, **changes)
    assert Claim.take(output) is None
    assert read_holder(output) is None
    age(path, LONG_AGO_S)
    claim = Claim.take(output)
    assert claim is not None
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_beat_tells_whether_its_holder_runs_here_or_may_be_this_process_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(**changes: object) -> tuple[bool, bool, float]:
        foreign_claim(tmp_path / "x.h5", **changes)
        beat = last_beat(tmp_path / "x.h5")
        assert beat is not None
        return beat.runs_here, beat.may_be_before, beat.patience_s

    own = claims._this_process(30.0)
    assert last_beat(tmp_path / "x.h5") is None
    assert seen(heartbeat_s=2.0) == (False, False, 2.0 * claims.MISSED_HEARTBEATS)
    assert seen(job=None)[:2] == (False, False)
    assert seen(host=own.host)[:2] == (False, True)
    assert seen(machine=own.machine, started=own.started)[:2] == (bool(own.machine), False)
    assert seen(pid="1") == (False, True, claims.HEARTBEAT_S * claims.MISSED_HEARTBEATS)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert seen()[:2] == (False, True)


def test_claim_whose_next_beat_was_waited_for_in_vain_is_stale_whatever_its_age(
    tmp_path: Path,
) -> None:
    output = tmp_path / "x.h5"
    path = foreign_claim(output)
    beat = last_beat(output)
    age(path, 1)
    assert Claim.take(output, dead=beat) is None  # another followed
    claim = Claim.take(output, dead=last_beat(output))
    assert claim is not None
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_claim_that_is_renewed_at_the_last_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.h5"
    age(foreign_claim(output), LONG_AGO_S)
    is_stale = claims._is_stale

    def renewed(path: Path, seen: claims._Seen, heartbeat_s: float) -> bool:
        stale = is_stale(path, seen, heartbeat_s)
        os.utime(path)  # between judging and acting
        return stale

    monkeypatch.setattr(claims, "_is_stale", renewed)
    assert Claim.take(output) is None
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5.claim"]


def test_claim_of_an_earlier_process_with_the_same_number_is_stale(tmp_path: Path) -> None:
    output = tmp_path / "x.h5"
    own = claims._this_process(30.0)
    if own.started is None:
        pytest.skip("this system does not tell when a process started")
    foreign_claim(output, machine=own.machine, started=own.started - 1)
    claim = Claim.take(output)
    assert claim is not None
    claim.release()


def test_same_process_number_in_another_container_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.h5"
    foreign_claim(output, host=claims._this_process(30.0).host, pid=2**22 + 1)
    assert Claim.take(output) is None
    # Nor where neither side can tell on which machine it is.
    monkeypatch.setattr(claims, "_machine", str)
    foreign_claim(output, machine="", pid=2**22 + 1)
    assert Claim.take(output) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_is_left_of_a_process_is_dead_and_a_name_with_brackets_is_none_of_its_numbers(
    tmp_path: Path,
) -> None:
    output = tmp_path / "x.h5"
    holder = start_holder(output)
    # Not waited for: a zombie, as below a batch system that does not look after its children.
    holder.kill()
    stat = Path(f"/proc/{holder.pid}/stat")
    while ") Z " not in stat.read_text():
        time.sleep(0.001)
    claim = Claim.take(output)
    assert claim is not None
    claim.release()
    holder.communicate()
    started, name = claims._start_ticks(os.getpid()), Path("/proc/self/comm").read_text()
    try:
        Path("/proc/self/comm").write_text("a) S 1 (b")
        assert claims._start_ticks(os.getpid()) == started
    finally:
        Path("/proc/self/comm").write_text(name)


def test_ticket_left_by_a_process_that_died_while_taking_over_is_taken_over(
    tmp_path: Path,
) -> None:
    output = tmp_path / "x.h5"
    path = foreign_claim(output)
    ticket = path.with_name(f"{path.name}.0123456789abcdef0123456789abcdef")
    ticket.write_text(path.read_text().replace("0123456789abcdef0", "fedcba98765432100"))
    age(path, LONG_AGO_S)
    assert Claim.take(output) is None
    age(ticket, LONG_AGO_S)
    claim = Claim.take(output)
    assert claim is not None
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_late_comer_who_judged_the_old_claim_leaves_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.h5"
    age(foreign_claim(output), LONG_AGO_S)
    taken: list[Claim | None] = []
    is_stale = claims._is_stale

    def overtaken(path: Path, seen: claims._Seen, heartbeat_s: float) -> bool:
        stale = is_stale(path, seen, heartbeat_s)
        if stale and not taken:
            taken.append(None)
            taken[0] = Claim.take(output)  # the other one, between judging and acting
        return stale

    monkeypatch.setattr(claims, "_is_stale", overtaken)
    assert Claim.take(output) is None
    (other,) = taken
    assert other is not None
    seen = read_holder(output)
    assert seen is not None
    assert seen.token == other.holder.token
    other.release()
    assert list(tmp_path.iterdir()) == []


def test_one_thread_renews_all_claims_and_ends_with_the_last(tmp_path: Path) -> None:
    outputs = [tmp_path / f"{n}.h5" for n in range(5)]
    held = [Claim.take(output, heartbeat_s=0.05) for output in outputs]
    assert sum(thread.name == "claims" for thread in threading.enumerate()) == 1
    for output in outputs:
        age(claim_path(output), LONG_AGO_S)
    deadline = time.monotonic() + 30
    while any(claim_path(o).stat().st_mtime < time.time() - 1000 for o in outputs):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for claim in held:
        assert claim is not None
        claim.release()
    assert not any(thread.name == "claims" for thread in threading.enumerate())


def test_claim_that_was_taken_over_says_so_once_and_leaves_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "x.h5"
    claim = Claim.take(output, heartbeat_s=3600.0)
    assert claim is not None
    claim.renew()
    assert caplog.messages == []
    foreign_claim(output)
    claim.renew()
    claim.renew()
    assert caplog.messages == [f"{claim.path}: this claim was taken over or removed"]
    claim.release()
    assert claim_path(output).exists()


def test_sleeper_releases_its_claim_by_the_rule_of_taking_over(tmp_path: Path) -> None:
    output = tmp_path / "x.h5"
    claim = Claim.take(output, heartbeat_s=3600.0)
    assert claim is not None
    claim._renewed -= LONG_AGO_S  # as after a night of SIGSTOP
    ticket = claim.path.with_name(f"{claim.path.name}.{claim.holder.token}")
    ticket.write_text("")  # somebody is taking it over at this moment
    claim.release()
    assert claim.path.exists()
    assert ticket.exists()


@pytest.mark.parametrize("renewed", [False, True])
def test_sleeper_whose_claim_nobody_takes_over_leaves_nothing(
    tmp_path: Path, renewed: bool
) -> None:
    claim = Claim.take(tmp_path / "x.h5", heartbeat_s=3600.0)
    assert claim is not None
    claim._renewed -= LONG_AGO_S
    ticket = claim.path.with_name(f"{claim.path.name}.{claim.holder.token}")
    if renewed:
        claim.renew()
        ticket.write_text("")  # no ticket is asked for by who is awake
    claim.release()
    assert list(tmp_path.iterdir()) == ([ticket] if renewed else [])


def test_forked_child_neither_renews_nor_releases_its_parents_claims(tmp_path: Path) -> None:
    code = """
import os, sys, threading
from pathlib import Path
from bioptimus.batch.claims import Claim
claim = Claim.take(Path(sys.argv[1]))
child = os.fork()
if not child:
    claim.release()
    alone = threading.active_count()
    Claim.take(Path(sys.argv[2]))  # its own, which a thread of its own renews
    os._exit(10 * alone + threading.active_count())
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status), claim.path.exists())
claim.release()
print(claim.path.exists())
"""
    out, _ = start(code, tmp_path / "x.h5", tmp_path / "y.h5").communicate(timeout=30)
    assert out.split() == ["12", "True", "False"]


def test_process_that_forgets_a_claim_ends_all_the_same(tmp_path: Path) -> None:
    code = HOLDER.replace("sys.stdin.read()", "")
    process = start(code, tmp_path / "x.h5")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "True\n", "")
    claim = Claim.take(tmp_path / "x.h5")
    assert claim is not None
    claim.release()


def test_folder_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"/file: is a file, not a folder; move it away, or"):
        Claim.take(tmp_path / "file" / "x.h5")


def test_folder_removed_while_claimed_does_not_break_the_release(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path / "f" / "x.h5")
    assert claim is not None
    claim.path.unlink()
    claim.path.parent.rmdir()
    claim.release()
