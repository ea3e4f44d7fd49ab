"""What the deciding services, scaler and planner, have in common: lead, watch, decide, write with the fence."""
