"""The simulator predicts a training step on a described cluster without running it, and without TorchRec.

`dmt.simulator.cluster` describes the cluster, `dmt.simulator.steps` the operations of a step as the runtime orders
them, and `dmt.simulator.timeline` runs them on the cores and links of a rank.
"""
