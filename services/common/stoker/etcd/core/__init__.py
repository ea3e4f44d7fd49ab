"""The decisions of the etcd layer, as pure functions: no clock, no network, no randomness."""
