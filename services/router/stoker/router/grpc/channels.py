"""One gRPC channel to each node agent, opened on first use."""

from __future__ import annotations

import grpc

from stoker.common import channels


class Channels(channels.Channels):
    """Channels by endpoint (host:port), for calls that pass bytes through."""

    def stream(self, endpoint: str, method: str) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
        """A server-streaming method that takes and gives bytes."""
        return self.to(endpoint).unary_stream(method)

    def unary(self, endpoint: str, method: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
        """A unary method that takes and gives bytes."""
        return self.to(endpoint).unary_unary(method)
