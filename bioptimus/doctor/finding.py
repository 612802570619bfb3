"""What the doctor says of one part."""

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]

DISTRIBUTION = "bioptimus-wsi"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: What was examined, one or two words.
        status: ``problem`` means that a run would fail or lie; ``warning`` that it will be
            slower or lacks something optional.
        fact: What was found.
        advice: What to do; empty when all is well.
    """

    name: str
    status: Status
    fact: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain JSON-ready types."""
        return asdict(self)


def ok(name: str, fact: str) -> Finding:
    """A part of which there is nothing to say but what it is."""
    return Finding(name=name, status="ok", fact=fact)
