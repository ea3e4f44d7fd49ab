"""The router: decides which replica serves a request, and relays it."""
