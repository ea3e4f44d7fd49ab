"""The node agent: runs engines on one host and reports their load and KV blocks."""
