"""Engines as the node agent sees them: how to start one, ask it, and follow its KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.node_agent.engine.protocol import Engine
from stoker.node_agent.engine.sim import SimEngine
from stoker.node_agent.engine.vllm import VllmEngine

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (VllmEngine(), SimEngine())}
"""Every kind of engine, by the name that deployment specs use."""
