"""What if: a trace, the real router and scaler, and a fleet of modelled replicas in simulated time."""
