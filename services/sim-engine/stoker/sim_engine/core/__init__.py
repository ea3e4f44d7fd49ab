"""What the simulated engine decides: blocks, batches, time and text. Pure."""
