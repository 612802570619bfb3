"""What this machine can run: processor, memory, and whether a compiled file fits it."""

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from bioptimus.errors import CheckpointError
from bioptimus.runtime.archive import ArchiveInfo


def processor_features() -> frozenset[str]:
    """Features of this machine's CPU as Linux names them, upper case; empty where not known."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).upper().split()) if found else frozenset()


def available_cores() -> int:
    """Cores that this process may use: of all, those it is bound to, within its group's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(_core_quota(Path("/")))))


def _core_quota(root: Path) -> float:
    """How many cores' worth of time control groups grant; as many as there are where none does."""
    quotas = [float(os.cpu_count() or 1)]
    for group in _cpu_groups(root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                texts = [(group / name).read_text(encoding="ascii") for name in names]
                quota, period = map(int, " ".join(texts).split())
            except (OSError, ValueError):  # another kind of group, or "max": no quota
                continue
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas)


def _cpu_groups(root: Path) -> Iterator[Path]:
    """This process's control groups that may limit its time, of both versions, and those above."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = top / "cpu" if controllers else top
        # In a container the name may be the host's, where none but the base is to be seen.
        group = base / place.lstrip("/")
        while group != base:
            yield group
            group = group.parent
        yield base


def free_memory(device: str) -> int:
    """Bytes that this process may still take on a device.

    On the CPU of Linux, what the kernel says is available, within the limit of a container; of
    other systems half the memory there is.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
    """
    if device != "cpu":
        import torch

        # What torch keeps for later use is free to it too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    available = int(found.group(1)) * 1024 if found else 0
    return min(available, _left_in_container(Path("/sys/fs/cgroup"), otherwise=available))


def _left_in_container(group: Path, *, otherwise: int) -> int:
    """What a control group's limit leaves, pages of files that can be dropped not counted."""
    try:
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        text = (group / "memory.stat").read_text(encoding="utf-8")
    except (OSError, ValueError):  # no limit, or another kind of system
        return otherwise
    droppable = re.search(r"^inactive_file (\d+)$", text, re.MULTILINE)
    return limit - used + (int(droppable.group(1)) if droppable else 0)


# How torch names a feature set → the Linux flags that all of it needs. A set that is not listed
# (other processor families) is left to the machine's name to judge.
_ISA_FLAGS = {
    "AVX2": {"AVX2", "FMA"},
    "AVX512": {"AVX512F", "AVX512DQ", "AVX512VL", "AVX512BW"},
    "AVX512_VNNI": {"AVX512_VNNI"},
    "AMX_TILE": {"AMX_TILE", "AMX_BF16", "AMX_INT8"},
    "ASIMD": {"ASIMD"},
    "SVE": {"SVE"},
}


def check_machine(info: ArchiveInfo) -> None:
    """Refuse a compiled file made for another machine: loading it would only warn, then crash.

    GPU architecture is compared where torch is at hand, see ``runtime/compiled.py``.

    Raises:
        CheckpointError: It needs another system, processor or processor feature.
    """
    if info.kind != "compiled":
        return
    advice = "use the portable file, or compile it on this machine with `bioptimus models compile`"
    system = {"linux": "linux", "darwin": "darwin"}.get(platform.system().lower(), "")
    if info.system and system and info.system.lower() != system:
        raise CheckpointError(
            f"{info.path}: compiled for {info.system}, this is {system}; {advice}"
        )
    if info.machine and info.machine != platform.machine():
        raise CheckpointError(
            f"{info.path}: compiled for {info.machine}, this is a {platform.machine()}; {advice}"
        )
    have = processor_features()
    if not have:
        return
    for feature in info.isa.upper().split():
        # SVE comes with its vector length, such as SVE256.
        name = "SVE" if feature.startswith("SVE") else feature
        if not _ISA_FLAGS.get(name, set()) <= have:
            raise CheckpointError(
                f"{info.path}: compiled for a CPU with {feature}, which this one lacks; {advice}"
            )
