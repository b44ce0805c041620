"""What is studied beside a run: automatic sharding, collective algorithms, benchmarks, validation and explanations.

Each lab is a package of its own that a command calls. Labs use all wings but `shoal.cli`, and nothing but `shoal.cli`
imports them. Nothing that trains depends on a lab.
"""
