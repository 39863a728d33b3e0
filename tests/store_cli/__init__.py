"""Tests of ``hicache store``."""
