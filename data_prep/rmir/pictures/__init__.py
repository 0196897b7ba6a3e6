"""Picture libraries: listing, download, filters and encoders."""
