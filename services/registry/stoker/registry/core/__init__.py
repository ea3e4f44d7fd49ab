"""The registry's decisions, pure: values in, values out."""
