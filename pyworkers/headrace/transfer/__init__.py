"""Moving KV blocks between pools of workers: `base.py` has the protocol, `server.py` and `client.py` its ends."""

from headrace.transfer.base import Limits, Pulled, Source, TransferError
from headrace.transfer.client import TransferClient
from headrace.transfer.server import TransferServer

__all__ = ["Limits", "Pulled", "Source", "TransferClient", "TransferError", "TransferServer"]
