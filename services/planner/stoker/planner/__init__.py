"""The planner: decides which node and which GPUs each replica gets."""
