"""Pick: the router decides, and its caller sends the request straight to the node (ADR 35)."""
