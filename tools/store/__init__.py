"""``hicache store``: looking into a store, and mending it, through the contract of its backend.

Nothing here knows how a backend keeps records, and nothing loads torch.
"""
