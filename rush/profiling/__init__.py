"""What a profile of a step shows: which kernels ran, where the time went, which communication nothing hides."""
