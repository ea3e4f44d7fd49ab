"""A simulated vLLM server: same API, metrics and KV events, no model."""
