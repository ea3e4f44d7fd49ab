"""From a request to tokens and block keys, the same way for every API."""
