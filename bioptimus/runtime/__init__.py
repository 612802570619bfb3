"""Loaded models and the batches that they run.

``build_server_model`` is offered here too; it is imported when it is asked for, since it leads to
torch. Importing this package sets the environment variables that torch reads when it is loaded,
where the user has not: every module that imports torch lies below, so this comes in time.
"""

from typing import TYPE_CHECKING, Any

from bioptimus.runtime.loader import prepare_environment

if TYPE_CHECKING:
    from bioptimus.runtime.loader import build_server_model as build_server_model

__all__ = ["build_server_model"]

prepare_environment()


def __getattr__(name: str) -> Any:
    if name == "build_server_model":
        from bioptimus.runtime.loader import build_server_model

        return build_server_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
