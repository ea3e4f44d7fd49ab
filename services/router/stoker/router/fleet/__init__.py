"""What is known of the fleet: one pool for each served model."""
