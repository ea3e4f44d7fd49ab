"""Tests of one stack on real vLLM: a package, so that the stack ends with the last of them."""
