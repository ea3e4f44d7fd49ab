"""Whether a leader may decide: pure."""
