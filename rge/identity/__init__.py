"""What a result depends on."""
