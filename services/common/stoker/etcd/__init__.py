"""A thin, asynchronous etcd v3 layer with a watch that survives compaction."""
