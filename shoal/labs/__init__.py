"""Studies beside training: automatic sharding, collective algorithms, benchmarks, validation and explanations.

Each lab is a separate package that a command calls. Labs may use every package except `shoal.cli`, and only `shoal.cli`
imports them. Training does not depend on labs.
"""
