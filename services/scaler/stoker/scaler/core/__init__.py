"""The scaler's decisions: pure functions of the fleet, what was decided before, what is known, and `now`.

A round (`decide`) asks each deployment's policy what it needs (`policies`), finds how far its count may move
(`limits`), shares the demand of a group among its deployments (`variants`), and names who goes (`victims`).
"""
