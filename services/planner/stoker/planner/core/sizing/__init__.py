"""How many GPUs a workload needs: memory, rates, replicas, layouts. Formulas and sources: docs/sizing.md."""
