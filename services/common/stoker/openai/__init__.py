"""InferenceService in the terms of an engine's OpenAI server, and back."""

RANK_HEADER = "x-data-parallel-rank"
"""vLLM's name for the data-parallel rank that shall serve. Whoever decides sets it; callers' own is not passed on."""
