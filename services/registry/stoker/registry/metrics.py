"""What the registry counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

AGENT_STREAMS = Gauge("stoker_registry_agent_streams", "Agents that report to this registry.")
WATCHERS = Gauge("stoker_registry_watchers", "Open watch streams.")
WATCHERS_DROPPED = Counter("stoker_registry_watchers_dropped_total", "Watchers disconnected for taking nothing.")
WATCH_COALESCED = Counter(
    "stoker_registry_watch_coalesced_total", "Times that digest steps waiting for a watcher gave way to snapshots."
)
ANNOUNCERS = Gauge("stoker_registry_announcers", "Routers that announce their dispatches here.")
DISPATCHES = Counter("stoker_registry_dispatches_total", "Dispatches announced by routers.")
DISPATCHES_REFUSED = Counter("stoker_registry_dispatches_refused_total", "Dispatches that were malformed.")
DEMAND_REFUSED = Counter("stoker_registry_demand_refused_total", "Reports of demand that were malformed.")
DISPATCH_BATCHES_DROPPED = Counter(
    "stoker_registry_dispatch_batches_dropped_total", "Batches of dispatches that a slow watcher never got."
)
DIGEST_KEYS = Gauge("stoker_registry_digest_keys", "KV-block keys held, all replicas together.")
DIGEST_RESYNCS = Counter("stoker_registry_digest_resyncs_total", "Digest snapshots asked of agents.")
REPORTS_REFUSED = Counter(
    "stoker_registry_reports_refused_total", "Reports of agents that were malformed or not theirs.", ["kind"]
)
ETCD_STALENESS = Gauge(
    "stoker_registry_etcd_staleness_seconds", "Time since etcd last proved that the view is current."
)
LEASE_RENEWALS = Counter("stoker_registry_lease_renewals_total", "Node leases renewed.")
LEASE_FAILURES = Counter(
    "stoker_registry_lease_renewal_failures_total", "Node leases not renewed, by cause.", ["cause"]
)
NODES_HELD = Gauge("stoker_registry_nodes_held", "Nodes shown although their leases ended: many ended at once.")
RECORDS_UNREADABLE = Counter("stoker_registry_records_unreadable_total", "etcd values that could not be read.")
FENCED = Counter("stoker_registry_fenced_writes_total", "Writes refused because their leader leads no more.")
