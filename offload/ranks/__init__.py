"""Several ranks, each a process with its device, that run one model together: messages, sums and their processes.

Rank 0 decides and sends commands to the other ranks, which apply them to their shards. Rank 0's side is in
`offload.ranks.leader`, the other ranks' in `offload.ranks.follower`.
"""
