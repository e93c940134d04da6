"""`rush watch`: the runs under a folder, live in a browser on this machine. Reads records, needs no torch."""
