"""The OpenAI API, and calls to engines, over HTTP."""
