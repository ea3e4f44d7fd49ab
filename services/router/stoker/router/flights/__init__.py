"""One request's way through the router, accounted for on every path."""
