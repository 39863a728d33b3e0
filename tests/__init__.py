"""Tests of HiCache."""
