"""The simulator predicts a training step on a described cluster without running it, and without TorchRec.

`dmt.simulator.cluster` describes the cluster, `dmt.simulator.work` counts what a step sends and computes, and
`dmt.simulator.steps` runs its operations on the cores and links of a rank.
"""
