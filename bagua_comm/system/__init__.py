"""Files and processes of this host."""
