"""A folder of runs -> a local page that follows them. Reads only, and never outside that folder."""
