"""The specification: pure functions on arrays, the release state machine, the table of combinations, the reference.

Nothing in here imports a framework. Frontends hand in arrays and an `ArrayOps` that says how their framework casts them.
"""
