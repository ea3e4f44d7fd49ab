"""What the router finds out about engines by itself."""
