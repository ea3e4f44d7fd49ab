"""The OpenAI HTTP API as vLLM serves it."""
