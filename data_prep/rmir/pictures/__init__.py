"""Picture libraries: listing, download, filters, near-duplicates and encoders."""
