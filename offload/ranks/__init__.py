"""Several ranks, each a process with its device, that run one model together: messages, sums and their processes.

Rank 0 decides and tells the others, who do the same to their part. What they do is in `offload.ranks.leader` and
`offload.ranks.follower`.
"""
