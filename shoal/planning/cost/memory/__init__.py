"""Memory of a rank in bytes, tensor by tensor."""
