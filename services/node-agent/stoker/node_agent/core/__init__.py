"""Decisions of the node agent: values in, values out."""
