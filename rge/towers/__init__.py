"""Vision towers that were trained elsewhere and are distributed in Python packages."""
