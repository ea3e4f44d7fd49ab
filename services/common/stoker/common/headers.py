"""Names of HTTP headers and gRPC metadata that clients and services share."""

POLICY = "x-stoker-policy"
"""The routing policy that a request asks for, where the router lets requests choose."""

TENANT = "x-stoker-tenant"
"""Who asks, where the router is not told to look elsewhere."""
