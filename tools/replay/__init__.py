"""Replaying request traces through the server's own planner, in virtual time.

``command`` is what ``hicache replay`` runs; ``replaying`` is one run, as a function.
"""
