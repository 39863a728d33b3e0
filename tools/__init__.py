"""The command line: what people run."""
