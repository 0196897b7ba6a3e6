"""Boards: many models on one set, published rows beside measured ones."""
