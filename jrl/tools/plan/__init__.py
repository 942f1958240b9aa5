"""The pod before the pod: does a run fit a TPU topology that nobody has rented yet, and about how long is a step?

chips (data) -> case (a run's shapes on a mesh) -> flops, budget, estimate (arithmetic)
                                                -> compiled (the run's own programs, compiled for the topology)
                                                -> report
"""
