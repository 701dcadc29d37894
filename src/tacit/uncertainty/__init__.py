"""Error bars, each with the kind of chance that it is about."""
