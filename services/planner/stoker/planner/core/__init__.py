"""The planner's decisions: pure functions of the fleet, the desired counts, what is assigned, and `now`.

`plan` draws up a round. `capacity` counts what is free, `placing` finds nodes (first fit; a better search
replaces only it), `rollout` says which replicas leave and when, `loss` tells a lost node from a late one.
"""
