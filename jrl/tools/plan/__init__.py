"""Plans runs for TPU topologies without TPUs: whether a run fits in memory, and about how long a step takes.

chips (data) -> case (a run's shapes on a mesh) -> flops, budget, estimate (arithmetic)
                                                -> compiled (the run's own programs, compiled for the topology)
                                                -> report
"""
