"""`rush scale`: one recipe on several numbers of devices, with several layouts."""
