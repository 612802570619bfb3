"""What every model client offers, wherever its model runs."""

from typing import Any, Protocol


class Client(Protocol):
    """A model that answers requests for tiles.

    Bodies are JSON: :class:`~bioptimus.inference.schemas.ModelRequest` going in and
    :class:`~bioptimus.inference.schemas.ModelResponse` coming out. A malformed request raises
    ``RequestError`` (a ``ValueError``), a failed forward pass ``_ForwardError`` (a
    ``RuntimeError``).
    """

    def predict(self, body: str, /) -> str:
        """The prediction for one tile."""

    def embed(self, body: str, /) -> str:
        """The embedding of one tile."""

    def predict_with_embedding(self, body: str, /) -> str:
        """Both, from one forward pass."""

    def metadata(self) -> str:
        """What is known about the model, a JSON object."""

    async def predict_async(self, body: str, /, session: Any = None) -> str:
        """The prediction for one tile; may share a forward pass with others."""

    async def embed_async(self, body: str, /, session: Any = None) -> str:
        """The embedding of one tile; may share a forward pass with others."""

    async def predict_with_embedding_async(self, body: str, /, session: Any = None) -> str:
        """Both, from one forward pass that may be shared with others."""

    def predict_batch(self, bodies: list[str], /) -> list[str]:
        """The predictions for several tiles, in order."""

    def embed_batch(self, bodies: list[str], /) -> list[str]:
        """The embeddings of several tiles, in order."""

    def predict_with_embedding_batch(self, bodies: list[str], /) -> list[str]:
        """Both for several tiles, in order."""
