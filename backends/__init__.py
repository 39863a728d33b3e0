"""Storage backends that HiCache ships; each is found by its entry point, like any other."""
