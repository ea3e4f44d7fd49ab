"""A router of several processes, and what they tell each other."""
