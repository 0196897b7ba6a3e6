"""Vision towers that were trained elsewhere and come with packages of their own."""
