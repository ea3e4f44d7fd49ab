"""InferenceService in the terms of an engine's OpenAI server, and back."""
