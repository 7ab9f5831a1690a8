"""The semantic-preserving tower transform followed by eye, in one process (DMT, arXiv 2403.00877, section 3.1.1).

The paper's example: 4 ranks on 2 hosts, 4 features in 2 towers. Tower 0 (host 0, ranks 0 and 1) has the features
orange and red, tower 1 (host 1, ranks 2 and 3) blue and green; rank i holds the table of feature i. Every rank has one
sample, whose id is the rank's number in every feature, and row ``id`` of table ``f`` holds the number ``10 f + id``:
21 is the embedding of feature 2 (blue) for the sample of rank 1.

>>> import torch
>>> from dmt import TowerTopology
>>> T, L = 2, 2
>>> G = T * L
>>> topology = TowerTopology(num_towers=T, ranks_per_tower=L)
>>> tables = 10 * torch.arange(G)[:, None] + torch.arange(G)
>>> ids = [[rank, rank, rank, rank] for rank in range(G)]                   # ids[rank][feature]

Step a, all-to-all over all ranks: the ids of feature i to rank i. They arrive in rank order.

>>> arrived = [torch.tensor([ids[sender][owner] for sender in range(G)]) for owner in range(G)]
>>> arrived[2].tolist()
[0, 1, 2, 3]

Step b, lookup. Step c, peer permute: the peers of a rank are the ranks with its local index, rank % L; in peer order
they stand side by side. Both steps commute: on ids (b after c) less is moved than on embeddings (3.1.3).

>>> topology.peer_order()
[0, 2, 1, 3]
>>> c_after_b = [tables[rank][arrived[rank]][topology.peer_order()] for rank in range(G)]
>>> looked_up = [tables[rank][arrived[rank][topology.peer_order()]] for rank in range(G)]
>>> looked_up[2].tolist(), all(torch.equal(x, y) for x, y in zip(c_after_b, looked_up))
([20, 22, 21, 23], True)

Step d, all-to-all inside each tower: the rank with local index l takes block l from every rank of its tower, and has
all features of the tower for all its peers, [features, peers].

>>> towers = topology.tower_groups()
>>> towers
[[0, 1], [2, 3]]
>>> met = [torch.stack([looked_up[r].view(L, T)[rank % L] for r in towers[rank // L]]) for rank in range(G)]
>>> met[0].tolist(), met[3].tolist()
([[0, 2], [10, 12]], [[21, 23], [31, 33]])

Step e, view as [peers, features]. A tower module would now compress each row; rank 0 has the rows of ranks 0 and 2.

>>> rows = [block.T for block in met]
>>> rows[0].tolist()
[[0, 10], [2, 12]]

Step f, all-to-all among peers, across hosts: row t goes back to the peer in tower t, which joins what the towers sent.

>>> peers = topology.peer_groups()
>>> peers
[[0, 2], [1, 3]]
>>> result = [torch.cat([rows[peer][rank // L] for peer in peers[rank % L]]) for rank in range(G)]
>>> [row.tolist() for row in result]
[[0, 10, 20, 30], [1, 11, 21, 31], [2, 12, 22, 32], [3, 13, 23, 33]]

The same numbers as a direct lookup, each sample on the rank it came from.

>>> direct = [torch.stack([tables[f][ids[rank][f]] for f in range(G)]) for rank in range(G)]
>>> all(torch.equal(x, y) for x, y in zip(result, direct))
True
"""

from __future__ import annotations
