"""PinPoint."""
