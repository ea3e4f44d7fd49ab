"""Streams straight from the node that a router picks: stoker up && python examples/look_aside.py."""

import sys

from stoker.client import Client

routers = sys.argv[1:] or ["127.0.0.1:7320"]
with Client(routers) as client:
    model = client.models()[0].id
    with client.stream(model, "Why is a warm KV cache worth keeping?", max_tokens=32) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        served, usage = stream.served, stream.usage
    if served is not None and usage is not None:
        way = "through the router" if served.relayed else "straight from its node"
        print(f"\n[{served.replica_id}, chosen by {served.reason}, {way}; {usage.prompt_tokens} prompt tokens]")
