"""Clients: one way to ask a model, wherever it runs."""

from bioptimus.models.clients.base import Client
from bioptimus.models.clients.failures import log_failures

__all__ = ["Client", "log_failures"]
