"""Loaded models and the batches that they run.

``build_server_model`` is offered here too; it is imported when it is asked for, since it leads to
torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bioptimus.runtime.loader import build_server_model as build_server_model

__all__ = ["build_server_model"]


def __getattr__(name: str) -> Any:
    if name == "build_server_model":
        from bioptimus.runtime.loader import build_server_model

        return build_server_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
