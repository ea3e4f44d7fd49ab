"""Plumbing every service shares: errors, RPC, configuration, logs, metrics, KV-block keys."""
