"""What backends on a disk share: vectored I/O, record frames, threads, the store's directory."""
