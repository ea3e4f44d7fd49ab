"""Workloads and measurements that drive a running stack."""
