"""A client that picks by a router and streams straight from the node that serves (docs/client.md).

    from stoker.client import Client

    with Client(["router-1:7320", "router-2:7320"]) as client:
        for chunk in client.stream("tiny", "Why is a warm KV cache worth keeping?", max_tokens=32):
            print(chunk.text, end="")

`AsyncClient` is the same for asyncio.
"""

from stoker.client.aio import AsyncClient, AsyncStream
from stoker.client.errors import Interrupted
from stoker.client.prompts import Prompt
from stoker.client.results import Choice, Chunk, Generation, Served, Usage
from stoker.client.settings import ClientSettings
from stoker.client.sync import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "ClientSettings",
    "Generation",
    "Interrupted",
    "Prompt",
    "Served",
    "Stream",
    "Usage",
]
