"""Envoy carries the tokens: the router decides for it, and hears from its access log how requests go."""
