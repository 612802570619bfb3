"""What this machine can run: processor, features, and whether a compiled file fits them."""

import platform
import re
from pathlib import Path

from bioptimus.errors import CheckpointError
from bioptimus.runtime.archive import ArchiveInfo


def processor_features() -> frozenset[str]:
    """Features of this machine's CPU as Linux names them, upper case; empty where not known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).upper().split()) if found else frozenset()


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
