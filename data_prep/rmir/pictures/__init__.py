"""A picture library and how its pictures are compared: download, near duplicates, encoders, clusters."""
