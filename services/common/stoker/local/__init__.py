"""A whole Stoker stack on one machine."""
