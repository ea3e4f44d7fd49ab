"""InferenceService over gRPC, to engines or by node agents."""
