"""The scaler's decisions: pure functions of the fleet, what was decided before, and `now`.

`count` says how many, `victims` says which go, `decide` draws both together. Later policies replace `count`
and the ranking of `victims`; what goes in and what comes out stays.
"""
