"""The registry: owns etcd, fans out membership, load and KV-block digests."""
