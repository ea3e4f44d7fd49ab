"""Decisions as they are told, remembered and recorded."""
