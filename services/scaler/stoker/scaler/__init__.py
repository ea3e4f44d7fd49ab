"""The scaler: decides how many replicas a deployment gets, and which to remove."""
