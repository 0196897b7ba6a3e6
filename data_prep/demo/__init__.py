"""The shipped picture set: everyday things drawn by seven icon families, and questions that relate them."""
