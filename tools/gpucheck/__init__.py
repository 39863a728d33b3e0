"""``python -m hicache.tools.gpucheck``: proves on a GPU, in minutes, what a CPU cannot show.

Six sections, each in a process of its own with a time of its own: one that dies takes nothing
else along. ``--device cpu`` is a dry run of every section at small sizes.
"""
