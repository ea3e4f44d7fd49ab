"""Engines as the node agent sees them: how to start one, ask it, and follow its KV cache."""
