"""A small, real engine that runs the cache at full stretch."""
