"""The `stoker` command."""
