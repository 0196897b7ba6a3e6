"""The web: clients that obey the environment, and pictures by their address."""
