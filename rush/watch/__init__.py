"""`rush watch`: what is under a folder of runs, live in a browser on this machine. Reads records, needs no torch."""
